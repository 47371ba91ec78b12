"""What a benchmark must say of the machine it ran on: its parts, and how quiet it was.

Shared machines are noisy in two ways. Other processes take CPU time, which /proc shows; and other
tenants take memory bandwidth, which shows only in a canary: a plain read of memory, timed beside
each measurement. Linux only.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

_REPOSITORY = Path(__file__).resolve().parent.parent
_CANARY_BYTES = 256 * 2**20
_CANARY_READS = 6


def describe_run() -> dict[str, Any]:
    """Which code ran where, when, and how: the head of every report."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": describe_command(),
        **describe_commit(),
        "host": describe_host(),
        "versions": describe_versions(),
    }


def describe_host() -> dict[str, Any]:
    """CPU, memory and kernel."""
    return {
        "cpu": _proc_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_proc_value("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "nice": os.nice(0),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg(),
    }


def describe_versions(
    packages: Sequence[str] = ("nanocore", "torch", "numpy"),
) -> dict[str, str | None]:
    """Versions of what decides speed; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        found[name] = None
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe_commit() -> dict[str, Any]:
    """The commit, and whether the code that was measured differs from it.

    Neither is known where the code is no repository, though its folder may be within another one.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _REPOSITORY:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--", "nanocore", "benchmarks", ":!benchmarks/results")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else changed != "",
    }


def describe_command() -> str:
    """The command line, absolute paths cut to their last component."""
    return "python " + " ".join(
        re.sub(r"(^|[=\s])/(?:[^/\s]*/)*(?=[^/])", r"\1", w) for w in sys.argv
    )


def spread(values: list[float]) -> dict[str, Any]:
    """Median and range of one figure, and its repetitions."""
    return {
        "median": round(median(values), 4),
        "min": min(values),
        "max": max(values),
        "values": values,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write what was measured as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def nice_sessions() -> Iterator[None]:
    """Give our session, and those of our child processes, the nice value of this process.

    An engine has a session of its own, and Linux's autogroups weigh sessions against each other,
    each at nice 0 until told otherwise. Without this `nice` would reach neither the engine nor the
    client, as seen from other sessions. Our own session gets its value back in the end.
    """
    own = Path("/proc/self/autogroup")
    before = _session_nice(own)
    for pid in _family(os.getpid()):
        _set_session_nice(Path(f"/proc/{pid}/autogroup"), str(os.nice(0)))
    try:
        yield
    finally:
        if before is not None:
            _set_session_nice(own, before)


def _session_nice(path: Path) -> str | None:
    """Of "/autogroup-6 nice 0" the "0"; None in the first session, whose file is empty."""
    try:
        words = path.read_text().split()
    except OSError:
        return None  # no autogroups
    return words[-1] if words else None


def _set_session_nice(path: Path, nice: str) -> None:
    with suppress(OSError):  # it has ended, or there are no autogroups, or no right to
        path.write_text(nice)


class BandwidthCanary:
    """Reads 256 MiB with all of torch's threads, to see what bandwidth there is just now."""

    def __init__(self) -> None:
        self._values = torch.ones(_CANARY_BYTES // 4)

    def measure(self) -> float:
        """GB/s, the best of a few reads: the worst ones measure the scheduler."""
        best_s = min(self._read_s() for _ in range(_CANARY_READS))
        return _CANARY_BYTES / best_s / 1e9

    def _read_s(self) -> float:
        start_s = time.perf_counter()
        self._values.sum()
        return time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the start: of the whole machine, and of a process with its children."""

    wall_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls, root_pid: int | None = None) -> CpuTimes:
        """Own is this process, or the one given, and its descendants."""
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
        own = _family(os.getpid() if root_pid is None else root_pid)
        busy = user + nice + system + irq + softirq + steal
        return cls(time.monotonic(), busy / ticks, sum(own.values()) / ticks)

    def foreign_share_since(self, start: CpuTimes) -> float:
        """Share of all cores, 0 to 1, that went to others since `start`."""
        foreign_s = (self.machine_s - start.machine_s) - (self.own_s - start.own_s)
        capacity_s = (self.wall_s - start.wall_s) * (os.cpu_count() or 1)
        return max(0.0, foreign_s / capacity_s)


def _family(root_pid: int) -> dict[int, int]:
    """A process and its living descendants, as process id to CPU ticks so far."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended
            fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
            pid = int(entry.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family: dict[int, int] = {}
    generation = {root_pid}
    while generation:
        family |= {pid: ticks[pid] for pid in generation}
        generation = {pid for pid, parent in parents.items() if parent in generation}
    return family


def _proc_value(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _git(*arguments: str) -> str | None:
    """Output of a git command; None where there is no repository, or no git."""
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
