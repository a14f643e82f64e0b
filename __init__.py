"""Train LLM agents from their own traffic: a recording proxy and an offline trainer."""

__version__ = "0.1.0"
