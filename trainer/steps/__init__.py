"""Optimizer steps: model, loss, critic. Everything that needs torch."""
