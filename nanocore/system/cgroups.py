"""The cgroups that this process is in, of both versions: where their limits are to be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Iterate over (folder of a cgroup above this process, whether it is version 2).

    controller: of version 1, such as "memory". root: where proc and what it names are mounted.
    """
    ours: dict[bool, str] = {}
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                ours[not controllers] = path
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mounted, mount = before.split(" ")[3:5]
            kind, _, options = after.split(" ", 2)
            is_v2 = kind == "cgroup2"
            if is_v2 in ours and (is_v2 or (kind == "cgroup" and controller in options.split(","))):
                # Of a hierarchy of which we see a part, our path may begin at its true root.
                cgroup = PurePosixPath(ours[is_v2])
                inside = cgroup.relative_to(mounted) if cgroup.is_relative_to(mounted) else cgroup
                mount = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount)
                inside = _relative(str(inside))
                for folder in (inside, *inside.parents):
                    yield root / _relative(mount) / folder, is_v2


def _relative(path: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath("/" + path).lstrip("/"))
