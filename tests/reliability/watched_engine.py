"""An engine, and what it holds: the leak check after an attack.

What an engine has in use is read from outside, from /proc and from its own counters, while nobody
but the reader has a session. After an attack and with its clients gone it must be what it was
before: requests, KV blocks, descriptors, threads, children, the files of its directory, and named
shared memory. Resident memory is left out, since allocators keep what they had.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from nanocore.demo_model import demo_model_folder
from tests.end_to_end import forked
from tests.reliability.visitor import PATIENCE_S, Visitor, visitor

DEMO_MODEL: Final = demo_model_folder()
MAX_NUM_SEQS: Final = 16
MAX_NUM_QUEUED_REQS: Final = 512


@dataclass(frozen=True)
class Footprint:
    """What an engine holds while nobody but the reader is connected."""

    num_clients: int
    num_requests: int
    num_blocks_held: int
    paused: bool
    num_descriptors: int
    num_threads: int
    children: tuple[int, ...]
    files: tuple[str, ...]
    shared_memory: tuple[str, ...]

    def leaked(self, before: Footprint) -> dict[str, Any]:
        """What differs from before, as (then, now); empty if nothing does."""
        then, now = asdict(before), asdict(self)
        return {name: (then[name], now[name]) for name in now if then[name] != now[name]}


class WatchedEngine:
    """An engine process whose footprint was taken when it was warm and idle."""

    def __init__(self, running: forked.Engine) -> None:
        self.pid, self.endpoint, self._stderr = running.pid, running.endpoint, running.stderr
        self._before: Footprint | None = None

    def log(self) -> str:
        """What it has logged so far."""
        return self._stderr.read_text()

    def remember(self) -> None:
        """Take what it holds now, once it is idle, for what it may hold later."""
        with visitor(self.endpoint) as watching:
            while (now := self._footprint(watching)).num_requests or now.num_clients != 1:
                pass
        self._before = now

    def assert_nothing_leaked(self) -> None:
        """Wait until it holds what it held then; sessions may just be ending."""
        assert self._before is not None
        deadline_s = time.monotonic() + PATIENCE_S
        with visitor(self.endpoint) as watching:
            while leaked := (now := self._footprint(watching)).leaked(self._before):
                # The thread of a start's late work ends in an idle moment, perhaps only now.
                num_threads = min(now.num_threads, self._before.num_threads)
                self._before = replace(self._before, num_threads=num_threads)
                assert time.monotonic() < deadline_s, leaked

    def _footprint(self, watching: Visitor) -> Footprint:
        stats = watching.stats()
        process = Path(f"/proc/{self.pid}")
        threads = list((process / "task").iterdir())
        folder = Path(self.endpoint.removeprefix("ipc://")).parent
        return Footprint(
            num_clients=stats.num_clients,
            num_requests=stats.num_requests_running + stats.num_requests_waiting,
            num_blocks_held=stats.num_blocks - stats.num_free_blocks,
            paused=stats.paused,
            num_descriptors=len(os.listdir(process / "fd")),
            num_threads=len(threads),
            children=tuple(sorted(pid for thread in threads for pid in _children(thread))),
            files=tuple(sorted(path.name for path in folder.iterdir())),
            shared_memory=tuple(sorted(_named_shared_memory(process))),
        )


def _children(thread: Path) -> list[int]:
    return [int(pid) for pid in (thread / "children").read_text().split()]


def _named_shared_memory(process: Path) -> set[str]:
    """Files of /dev/shm that it maps; other processes have theirs there as well."""
    lines = (process / "maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


@contextmanager
def watched_engine(*flags: str, endpoint: str | None = None) -> Iterator[WatchedEngine]:
    """An engine with the demo model that must still serve when the block ends."""
    with forked.engine(DEMO_MODEL, *flags, endpoint=endpoint) as running:
        yield WatchedEngine(running)
