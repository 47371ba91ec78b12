"""Which web pages may use a server that asks for no key: those that it serves itself.

A page of any site can have a browser send requests to loopback, and by a name of its own that it
lets point there (DNS rebinding) even read the answers. The names by which we are asked tell.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Final

from nanocore.http.errors import HttpError, bad_request

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/\s]*)(:[0-9]*)?")


def check_site(
    hosts: Sequence[bytes], origin: bytes | None, allowed_hosts: Collection[str]
) -> None:
    """Whether a request comes from here, as its Host and Origin say it.

    hosts: each Host that it has. allowed_hosts: names beside localhost and addresses; "*" is any.
    An origin that is allowed is not asked of here.

    Raises:
        HttpError: it does not, or the Host is none.
    """
    asked = b", ".join(hosts).decode("latin-1").lower()
    parts = _HOST.fullmatch(asked)
    if parts is None:
        raise bad_request(f"Host: {asked[:200]!r} is no name or address, with or without a port")
    name = parts[1].strip("[]")
    if hosts and "*" not in allowed_hosts and not _is_ours(name, allowed_hosts):
        raise HttpError(
            403,
            f"this server is not called {name[:200]!r}: without an API key it answers to localhost "
            "and addresses alone; name others with --allowed-hosts, or have keys",
        )
    if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != asked:
        raise HttpError(
            403,
            "a web page of another site may not use a server without an API key: name its origin "
            "with --allowed-origins",
        )


def _is_ours(name: str, allowed: Collection[str]) -> bool:
    is_local = name == "localhost" or name.endswith(".localhost")
    return is_local or name in allowed or is_address(name)


def is_address(name: str) -> bool:
    """Whether it is one of IP, without brackets."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
