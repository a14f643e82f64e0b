"""Bytes between the agent, the proxy and the engine: HTTP/1.1, WebSocket, connections. Knows no call."""
