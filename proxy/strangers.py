"""Without a token, programs of this machine are let in; a web page from elsewhere is not.

Loopback alone does not keep pages out: a browser on this machine runs them, sends their requests to any
address, and calls 127.0.0.1 by a page's own name where its DNS says so (DNS rebinding). Such requests are
known by their `Host`, where it is a public name, or by their `Origin`, where it is a public name or address.
Names that no public DNS gives (`localhost`, a name without a dot, `host.docker.internal`) are let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

_PRIVATE_ENDINGS = (".localhost", ".internal", ".local")
_WAY_OUT = "list it in the setting allowed_hosts, or give the proxy a token (LIGHTNING_PROXY_TOKEN)"


def stranger(headers: Iterable[tuple[bytes, bytes]], allowed_hosts: Collection[str]) -> str | None:
    """What a request that a page from elsewhere may have sent is told; None for any other."""
    for name, value in headers:
        if name == b"host" and not _may_be_called(_hostname(value), allowed_hosts):
            return f"without a token this proxy is not called {_shown(value)}: {_WAY_OUT}"
        if name == b"origin" and not _may_send(value, allowed_hosts):
            return f"without a token a page of {_shown(value)} can't use this proxy: {_WAY_OUT}"
    return None


def _may_be_called(hostname: str, allowed_hosts: Collection[str]) -> bool:
    """By any address: a browser sends the name that the page used, so there is no name to be rebound."""
    return _is_private_name(hostname) or hostname in allowed_hosts or _address(hostname) is not None


def _may_send(origin: bytes, allowed_hosts: Collection[str]) -> bool:
    """Browsers write `null` for pages whose origin they hide; only web pages come from a web server."""
    scheme, separator, place = origin.partition(b"://")
    if not separator:
        return False
    hostname, address = _hostname(place), _address(_hostname(place))
    if scheme.lower() not in (b"http", b"https") or hostname in allowed_hosts:
        return True
    return _is_private_name(hostname) if address is None else not address.is_global


def _is_private_name(hostname: str) -> bool:
    return not set(".:") & set(hostname) or hostname.endswith(_PRIVATE_ENDINGS)


def _address(hostname: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address  # ::ffff:1.2.3.4 is as public as 1.2.3.4


def _hostname(authority: bytes) -> str:
    """Of `name:port`, or `[address]:port`."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _shown(value: bytes) -> str:
    return repr(value[:128].decode("latin-1"))
