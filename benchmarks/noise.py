"""How quiet the machine was beside a measurement, and how to be heard on a busy one.

Shared machines are noisy in two ways. Other processes take CPU time, which /proc shows; and other
tenants take memory bandwidth, which shows only in a canary: a plain read of memory, timed beside
each measurement. Linux only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_CANARY_BYTES = 256 * 2**20
_CANARY_READS = 6


@dataclass(slots=True)
class Noise:
    """Of one measurement. foreign_cpu_share: part of all cores, 0 to 1, that went to others.

    canary_gb_per_s: read bandwidth beside it, the lower of before and after.
    """

    foreign_cpu_share: float = 0.0
    canary_gb_per_s: float = 0.0


class NoiseMeter:
    """Measures the noise beside what runs in a `with`."""

    def __init__(self) -> None:
        self._canary = BandwidthCanary()

    @contextmanager
    def beside(self, root_pid: int | None = None) -> Iterator[Noise]:
        """The noise, known after the block. root_pid: whose processes are not noise (ours)."""
        noise = Noise()
        before = self._canary.measure()
        start = CpuTimes.now(root_pid)
        yield noise
        noise.foreign_cpu_share = round(CpuTimes.now(root_pid).foreign_share_since(start), 4)
        noise.canary_gb_per_s = round(min(before, self._canary.measure()), 2)


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
