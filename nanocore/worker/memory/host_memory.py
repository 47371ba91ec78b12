"""Memory that this process and others beside it can still have on this host.

The least of what the system has free, what the cgroups above this process have left (versions 1 and
2), and what its own resource limits allow. Pages of files that a cgroup could give back at once
count as free, as they do in MemAvailable. Imports no torch, so that it can be asked before.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ConfigError
from nanocore.system.cgroups import cgroup_folders

_V1_FILES: Final = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES: Final = ("memory.max", "memory.high"), "memory.current", "inactive_file"


def host_bytes(root: Path = Path("/")) -> int:
    """Bytes that all processes of our cgroup together can still have.

    Args:
        root: where proc and what it names are mounted.

    Raises:
        ConfigError: the system does not say.
    """
    return max(0, min([_system_bytes(root), *_cgroup_bytes(root)]))


def address_space_bytes() -> int | None:
    """Bytes that this process can still map (ulimit -v); None: no limit."""
    return _left(resource.RLIMIT_AS, "VmSize")


def data_bytes() -> int | None:
    """Bytes that it can still map to write to them (ulimit -d); None: no limit."""
    return _left(resource.RLIMIT_DATA, "VmData")


def process_bytes() -> int | None:
    """Bytes that this process can still have by its resource limits; None: they set no limit."""
    left = address_space_bytes(), data_bytes()
    return min((num_bytes for num_bytes in left if num_bytes is not None), default=None)


def resident_bytes() -> int:
    """Bytes of memory that this process takes now."""
    return _used("VmRSS")


def _left(limit: int, used_name: str) -> int | None:
    limit_bytes, _ = resource.getrlimit(limit)
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    return max(0, limit_bytes - _used(used_name))


def _used(name: str) -> int:
    return _fields(Path("/proc/self/status"))[name] * 1024


def _system_bytes(root: Path) -> int:
    try:
        fields = _fields(root / "proc/meminfo")
        return fields.get("MemAvailable", fields["MemTotal"]) * 1024
    except (OSError, KeyError):
        raise ConfigError("/proc/meminfo does not say how much memory there is") from None


def _cgroup_bytes(root: Path) -> Iterator[int]:
    for folder, is_v2 in cgroup_folders("memory", root):
        limit_names, usage_name, reclaimable_name = _V2_FILES if is_v2 else _V1_FILES
        with suppress(OSError, ValueError, KeyError):
            stat = _fields(folder / "memory.stat")
            used = int((folder / usage_name).read_text()) - stat.get(reclaimable_name, 0)
            for name in limit_names:
                with suppress(OSError, ValueError):  # absent, or "max"
                    yield int((folder / name).read_text()) - used


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name value` or `name: value kB`."""
    pattern = re.compile(r"(\w+):?\s+(\d+)")
    matches = map(pattern.match, path.read_text().splitlines())
    return {match[1]: int(match[2]) for match in matches if match}
