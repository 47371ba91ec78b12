"""The check that protects a server without API keys from web pages of other sites.

A page of any site can make a browser send requests to loopback. If its own name resolves to
loopback (DNS rebinding), it can even read the responses. Host and Origin reveal both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Final

from nanocore.http.http_errors import HttpError, bad_request

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/\s]*)(:[0-9]*)?")


def check_host(
    hosts: Sequence[bytes], origin: bytes | None, allowed_hosts: Collection[str]
) -> None:
    """Check a request's Host and Origin.

    Args:
        hosts: values of the Host header.
        origin: None if it is absent, or allowed by --allowed-origins.
        allowed_hosts: names in addition to localhost and addresses; "*" allows any.

    Raises:
        HttpError: the host is invalid or foreign, or the origin is another site.
    """
    # Two Host headers are joined to an invalid name: a proxy could have used either one.
    host_header = b", ".join(hosts).decode("latin-1").lower()
    parts = _HOST.fullmatch(host_header)
    if parts is None:
        raise bad_request(
            f"Host: {host_header[:200]!r} is not a name or address with an optional port"
        )
    name = parts[1].strip("[]")
    is_local = name == "localhost" or name.endswith(".localhost") or is_address(name)
    if hosts and not is_local and "*" not in allowed_hosts and name not in allowed_hosts:
        raise HttpError(
            403,
            f"the host {name[:200]!r} is not accepted: without an API key this server answers only "
            "to localhost and IP addresses; allow other names with --allowed-hosts, or set keys",
        )
    if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host_header:
        raise HttpError(
            403,
            "a web page of another site may not use a server without an API key: allow its origin "
            "with --allowed-origins",
        )


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
