"""The proxy's own HTTP API, under `/lightning/api`: episodes, rewards, policies, status. Off the hot path."""

from .application import create_api
from .context import ApiContext

__all__ = ["ApiContext", "create_api"]
