"""The CPU cores that native kernels run on: one thread on each.

Only cores of the affinity mask count, which `taskset`, `numactl` and cpusets narrow. They are given
out NUMA node by node, so that a rank has cores of one node, and with them the memory that it
touches first, wherever numbers allow it; hyperthreads of a core go to the same rank. All of them
are used: on a virtual Xeon two that seem to share a core read 1.9 times as fast as one, and
multiplied 1.2 times as fast (benchmarks/results/cores.json).

A CPU quota (cgroups 1 and 2) below the number of cores allows fewer threads. These are not pinned:
other containers with quotas would pin theirs to the same cores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from nanocore.system.cgroups import cgroup_folders

logger = logging.getLogger(__name__)

FLOATING: Final = -1
"""In place of a core: the thread runs wherever the system puts it."""


class CpuCores(msgspec.Struct, frozen=True):
    """Cores that may be used.

    nodes: by NUMA node. quota: CPU seconds a second that a cgroup allows, or None.
    """

    nodes: list[list[int]]
    quota: float | None

    @property
    def num_threads(self) -> int:
        """Threads that run at once without being throttled."""
        num_cores = sum(map(len, self.nodes))
        return num_cores if self.quota is None else max(1, min(num_cores, int(self.quota)))

    def of_ranks(self, num_ranks: int) -> list[list[int]]:
        """Return each rank's cores; a core is shared where ranks are more than threads."""
        cores = [core for node in self.nodes for core in node]
        num_threads = self.num_threads
        if num_threads < len(cores):
            cores = [FLOATING] * num_threads
        # Whole ranks to a node, if the numbers allow that: nodes may have different sizes.
        per_node, left = divmod(num_ranks, len(self.nodes))
        if not left and num_threads > num_ranks and FLOATING not in cores:
            return [part for node in self.nodes for part in _shares(node, per_node)]
        return _shares(cores, num_ranks)

    def describe(self, num_ranks: int) -> str:
        """One line, or "" if there is nothing that a user would not expect."""
        num_cores, parts = sum(map(len, self.nodes)), []
        if self.num_threads < num_cores:
            parts.append(f"a CPU quota of {self.quota:g} allows {self.num_threads} thread(s)")
        if num_ranks > self.num_threads:
            parts.append(f"{num_ranks} ranks share them, which is slow: use fewer")
        elif num_ranks % (num_nodes := len(self.nodes)):
            parts.append(f"with --tp {num_nodes} each rank reads memory of its own NUMA node")
        return f"{num_cores} CPU cores: {'; '.join(parts)}" if parts else ""


def kernel_cores(num_ranks: int = 1) -> list[list[int]]:
    """Return the cores of each rank on this machine, one for each of its threads, or FLOATING."""
    found = read_cores()
    if line := found.describe(num_ranks):
        logger.info(line)
    return found.of_ranks(num_ranks)


def read_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> CpuCores:
    """Read which cores there are. What the system does not say counts as one node of plain cores.

    Args:
        root: where sys, proc and what it names are mounted.
        allowed: the affinity mask, by default this process's.
    """
    allowed = set(os.sched_getaffinity(0) if allowed is None else allowed)
    folders = (root / "sys/devices/system").glob("node/node[0-9]*")
    nodes = sorted(sorted(_cores_in(folder / "cpulist") & allowed) for folder in folders)
    nodes.append(sorted(allowed.difference(*nodes)))

    def place(core: int) -> tuple[int, int]:
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        return min(_cores_in(path), default=core), core

    return CpuCores([sorted(node, key=place) for node in nodes if node], _quota(root))


def _shares(cores: list[int], num_ranks: int) -> list[list[int]]:
    if not (share := len(cores) // num_ranks):
        return [[cores[rank % len(cores)]] for rank in range(num_ranks)]
    return [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]


def _cores_in(path: Path) -> set[int]:
    """The numbers of a file such as `0-3,8`."""
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text().split(","):
            first, _, last = part.strip().partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _quota(root: Path) -> float | None:
    quotas = []
    for folder, is_v2 in cgroup_folders("cpu", root):
        with suppress(OSError, ValueError):  # absent, or "max"
            if is_v2:
                limit, period = map(float, (folder / "cpu.max").read_text().split())
            else:
                limit = float((folder / "cpu.cfs_quota_us").read_text())
                period = float((folder / "cpu.cfs_period_us").read_text())
            if limit > 0 and period > 0:
                quotas.append(limit / period)
    return min(quotas, default=None)
