"""Memory that this process and others beside it can still have on this host.

The least of what the system has free, what the cgroups above this process have left (versions 1 and
2), and what its own resource limits allow. Pages of files that a cgroup could give back at once
count as free, as they do in MemAvailable. Imports no torch, so that it can be asked before.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nanocore.protocol.errors import ConfigError

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


def _left(limit: int, used_name: str) -> int | None:
    limit_bytes, _ = resource.getrlimit(limit)
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    return max(0, limit_bytes - _fields(Path("/proc/self/status"))[used_name] * 1024)


def _system_bytes(root: Path) -> int:
    try:
        fields = _fields(root / "proc/meminfo")
        return fields.get("MemAvailable", fields["MemTotal"]) * 1024
    except (OSError, KeyError):
        raise ConfigError("/proc/meminfo does not say how much memory there is") from None


def _cgroup_bytes(root: Path) -> Iterator[int]:
    for mount, cgroup, is_v2 in _memory_cgroups(root):
        limit_names, usage_name, reclaimable_name = _V2_FILES if is_v2 else _V1_FILES
        for folder in (cgroup, *cgroup.parents):
            path = root / mount / folder
            with suppress(OSError, ValueError, KeyError):
                stat = _fields(path / "memory.stat")
                used = int((path / usage_name).read_text()) - stat.get(reclaimable_name, 0)
                for name in limit_names:
                    with suppress(OSError, ValueError):  # absent, or "max"
                        yield int((path / name).read_text()) - used


def _memory_cgroups(root: Path) -> Iterator[tuple[PurePosixPath, PurePosixPath, bool]]:
    """(where a hierarchy is mounted, our cgroup in it, whether it is version 2)."""
    ours: dict[bool, str] = {}
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                ours[not controllers] = path
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mounted, mount = before.split(" ")[3:5]
            kind, _, options = after.split(" ", 2)
            is_v2 = kind == "cgroup2"
            if is_v2 in ours and (is_v2 or (kind == "cgroup" and "memory" in options.split(","))):
                # Of a hierarchy of which we see a part, our path may begin at its true root.
                cgroup = PurePosixPath(ours[is_v2])
                inside = cgroup.relative_to(mounted) if cgroup.is_relative_to(mounted) else cgroup
                mount = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount)
                yield _relative(mount), _relative(str(inside)), is_v2


def _relative(path: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath("/" + path).lstrip("/"))


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name value` or `name: value kB`."""
    pattern = re.compile(r"(\w+):?\s+(\d+)")
    matches = map(pattern.match, path.read_text().splitlines())
    return {match[1]: int(match[2]) for match in matches if match}
