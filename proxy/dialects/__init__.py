"""Responses and Messages, translated by LiteLLM (in a process of its own) on top of our own chat route."""
