"""ServeOptions: what `nanocore serve` was asked for."""

from __future__ import annotations

import resource
from typing import Final

import msgspec

from nanocore.http.server_settings import ServerSettings
from nanocore.http.settings import AppSettings

LAUNCH_TIMEOUT_S: Final = 600.0
JOIN_TIMEOUT_S: Final = 10.0
MAX_RESTARTS: Final = 5
SHUTDOWN_TIMEOUT_S: Final = 25.0
"""Five seconds less than Kubernetes gives a process: the engine ends in them."""
RESERVED_DESCRIPTORS: Final = 128
"""Of a process, for all that is no connection of a client."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked each for itself.

    uds: in place of host and port. engine_flags: of a launched engine. hint: what to add if it
    refuses them. max_restarts, standby: of a launched engine, see `EngineKeeper`.
    endpoints, curve_dir: of the engines to join; no endpoint: one is launched.
    """

    app: AppSettings
    server: ServerSettings
    host: str
    port: int
    uds: str | None
    engine_flags: tuple[str, ...]
    hint: str
    max_restarts: int
    standby: bool
    endpoints: tuple[str, ...]
    curve_dir: str | None
    tokenizer: str | None
    start_timeout_s: float
    http_workers: int
    shutdown_timeout_s: float


def connection_limit(asked: int | None) -> int:
    """How many connections a process has descriptors for, or fewer if so many are asked for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if hard == resource.RLIM_INFINITY else max(1, hard - RESERVED_DESCRIPTORS)
    return most if asked is None else min(asked, most)


def raise_descriptor_limit() -> None:
    """Allow this process, and those that it starts, as many descriptors as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
