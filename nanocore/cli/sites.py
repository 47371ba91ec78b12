"""The flags that say which web pages may use a server, brought to how browsers say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from nanocore.http.host_check import is_address
from nanocore.protocol.errors import ConfigError

_HOST: Final = re.compile(r"[^][:@/*\s]+")
_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^][:@/*\s]+)(:[0-9]+)?/?")
_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}


def read_hosts(host: str | None, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names by which a server may be asked; host: that of --host.

    Raises:
        ConfigError: one that no Host header can have.
    """
    for name in allowed:
        if name != "*" and not _HOST.fullmatch(name) and not is_address(name.strip("[]")):
            raise ConfigError(
                f"--allowed-hosts {name!r}: a name or an address, without scheme and port; or *"
            )
    named = [] if host is None else [host]
    return tuple(name.lower().strip("[]") for name in (*named, *allowed))


def read_origin(given: str) -> str:
    """An origin as browsers send it: in lower case, without a port that its scheme implies.

    Raises:
        ConfigError: it is none.
    """
    if given == "*":
        return given
    parts = _ORIGIN.fullmatch(given.lower())
    if parts is None:
        raise ConfigError(
            f"--allowed-origins {given}: an origin is https://NAME or https://NAME:PORT, or *"
        )
    scheme, name, port = parts.groups()
    return f"{scheme}://{name}{'' if port in (None, _USUAL_PORTS.get(scheme)) else port}"
