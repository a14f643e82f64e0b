"""Transitions laid out as micro-batches: a prefix tree, or rows. Numpy alone, no torch."""
