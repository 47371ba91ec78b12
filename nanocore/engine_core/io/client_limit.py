"""How many clients an engine serves: as many as asked for, and as its descriptors allow.

Every connection is a descriptor, and the process needs some for itself. So some are kept back, and
connections without a session, which cost nothing to make, get a share of the rest and no more.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Final

from nanocore.protocol.errors import ConfigError

DEFAULT_MAX_NUM_CLIENTS: Final = 1024
MAX_GUESTS: Final = 256
MIN_GUESTS: Final = 8
_KEPT_BACK: Final = 24  # model files, graphs, ranks, logs: what is opened while serving


@dataclass(frozen=True, slots=True)
class ClientLimit:
    """max_num_clients: sessions at once. max_connections: with those that have none."""

    max_num_clients: int
    max_connections: int

    @classmethod
    def of_this_process(cls, asked: int | None) -> ClientLimit:
        """What the descriptors allow that are free now. asked: sessions; None: a good many.

        Raises:
            ConfigError: they do not allow as many as asked for, or not a single one.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_free = 2**31 if limit == resource.RLIM_INFINITY else limit
        num_free -= len(os.listdir("/proc/self/fd")) + _KEPT_BACK
        most = num_free - MIN_GUESTS
        wanted = DEFAULT_MAX_NUM_CLIENTS if asked is None else asked
        if most < (asked or 1):
            raise ConfigError(
                f"--max-num-clients {wanted}: this process may have {limit} descriptors, which is "
                f"enough for {max(0, most)} clients; raise the limit (ulimit -Hn) or lower the flag"
            )
        max_num_clients = min(wanted, most)
        return cls(max_num_clients, min(num_free, max_num_clients + MAX_GUESTS))


def raise_descriptor_limit() -> None:
    """Allow as many connections as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
