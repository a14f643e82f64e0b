"""The proxy's own HTTP API, under `/lightning/api`: episodes, rewards, policies, status. Off the hot path."""

from .context import ApiContext, create_api

__all__ = ["ApiContext", "create_api"]
