"""Without a token, programs of this machine are let in; a web page from elsewhere is not.

Loopback alone does not keep pages out: a browser on this machine runs them, sends their requests to any
address, and calls 127.0.0.1 by a page's own name where its DNS says so (DNS rebinding). Such requests are
known by their `Origin`, or by a `Host` that is a public name. Addresses and names that no public DNS gives
(`localhost`, a name without a dot, `host.docker.internal`) are let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

_PRIVATE_ENDINGS = (".localhost", ".internal", ".local")
_WAY_OUT = "list it in the setting allowed_hosts, or give the proxy a token (LIGHTNING_PROXY_TOKEN)"


def stranger(headers: Iterable[tuple[bytes, bytes]], allowed_hosts: Collection[str]) -> str | None:
    """What a request that a page from elsewhere may have sent is told; None for any other."""
    for name, value in headers:
        if name == b"host" and not _is_private(_hostname(value), allowed_hosts):
            return f"without a token this proxy is not called {_shown(value)}: {_WAY_OUT}"
        if name == b"origin" and not _is_of_here(value, allowed_hosts):
            return f"without a token a page of {_shown(value)} can't use this proxy: {_WAY_OUT}"
    return None


def _is_of_here(origin: bytes, allowed_hosts: Collection[str]) -> bool:
    """Browsers write `null` for pages whose origin they hide; only web pages come from a web server."""
    scheme, separator, place = origin.partition(b"://")
    if not separator:
        return False
    return scheme.lower() not in (b"http", b"https") or _is_private(_hostname(place), allowed_hosts)


def _is_private(hostname: str, allowed_hosts: Collection[str]) -> bool:
    if "." not in hostname or hostname.endswith(_PRIVATE_ENDINGS) or hostname in allowed_hosts:
        return True
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        return False
    return True


def _hostname(authority: bytes) -> str:
    """Of `name:port`, or `[address]:port`."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _shown(value: bytes) -> str:
    return repr(value[:128].decode("latin-1"))
