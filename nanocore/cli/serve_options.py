"""ServeOptions: what `nanocore serve` was asked for."""

from __future__ import annotations

import resource
from typing import Final

import msgspec

from nanocore.cli.engine_choice import EngineChoice
from nanocore.http.server_settings import ServerSettings
from nanocore.http.settings import AppSettings
from nanocore.system.logs import LogFormat

SHUTDOWN_TIMEOUT_S: Final = 25.0
"""Five seconds less than Kubernetes gives a process: the engine ends in them."""
RESERVED_DESCRIPTORS: Final = 128
"""Of a process, for all that is no connection of a client."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked each for itself.

    uds: in place of host and port. standby: of a launched engine, see `EngineSupervisor`.
    """

    app: AppSettings
    server: ServerSettings
    host: str
    port: int
    uds: str | None
    engine: EngineChoice
    standby: bool
    http_workers: int
    log_format: LogFormat
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
