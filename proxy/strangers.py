"""Without a token, programs of this machine are let in; a web page from elsewhere is not.

Loopback alone does not keep pages out: a browser on this machine runs them, sends their requests to any
address, and calls 127.0.0.1 by a page's own name where its DNS says so (DNS rebinding). Such requests are
known by their `Host`, where it is a public name, or by their `Origin`, where it is a public name or address.
Names that no public DNS gives (`localhost`, a name without a dot, `host.docker.internal`) are let in.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

_AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^][:/@\\]*))(?::[0-9]*)?")
_PRIVATE_ENDINGS = (".localhost", ".internal", ".local", ".lan", ".home.arpa")
_WAY_OUT = "list it in the setting allowed_hosts, or give the proxy a token (LIGHTNING_PROXY_TOKEN)"


def stranger(headers: Iterable[tuple[bytes, bytes]], allowed_hosts: Collection[str]) -> str | None:
    """What a request that a page from elsewhere may have sent is told; None for any other."""
    for name, value in headers:
        if name == b"host" and not _may_be_called(value, allowed_hosts):
            return f"without a token this proxy is not called {_shown(value)}: {_WAY_OUT}"
        if name == b"origin" and not _may_send(value, allowed_hosts):
            return f"without a token a page of {_shown(value)} can't use this proxy: {_WAY_OUT}"
    return None


def _may_be_called(host: bytes, allowed_hosts: Collection[str]) -> bool:
    """By any address: a browser sends the name that the page used, so there is no name to be rebound."""
    hostname = _hostname(host)
    if hostname is None:
        return False
    return _is_private_name(hostname) or hostname in allowed_hosts or _address(hostname) is not None


def _may_send(origin: bytes, allowed_hosts: Collection[str]) -> bool:
    """Browsers write `null` for pages whose origin they hide; only web pages come from a web server."""
    scheme, separator, place = origin.partition(b"://")
    if separator and scheme.lower() not in (b"http", b"https"):
        return True
    hostname = _hostname(place)
    if not hostname:
        return False
    address = _address(hostname)
    if hostname in allowed_hosts or (address is not None and not address.is_global):
        return True
    return address is None and _is_private_name(hostname)


def _is_private_name(hostname: str) -> bool:
    return not set(".:") & set(hostname) or hostname.endswith(_PRIVATE_ENDINGS)


def _address(hostname: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address  # ::ffff:1.2.3.4 is as public as 1.2.3.4


def _hostname(authority: bytes) -> str | None:
    """Of `name:port`, or `[address]:port`; None for anything else. A dot at a name's end is left out, unless
    it is all that says that the name is public."""
    found = _AUTHORITY.fullmatch(authority.decode("latin-1").strip().lower())
    if found is None:
        return None
    if found["address"] is not None:
        return found["address"]
    name = found["name"]
    return name.removesuffix(".") if "." in name[:-1] else name


def _shown(value: bytes) -> str:
    return repr(value[:128].decode("latin-1"))
