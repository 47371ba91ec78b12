"""Memory that processes of one host share: counters to wait on, and bytes to pass.

The region is a memfd: it has no name, whoever inherits the descriptor may map it, and it vanishes
with the last descriptor and mapping. It begins with counters, each written by one side only and
alone in its cache line; the payload follows.

Ordering: a writer fills the payload, then advances its counter; a reader waits for the counter,
then reads the payload. That needs stores seen in the order they were made and loads made in order,
which x86-64 guarantees (total store order; `copy_` has fenced its non-temporal stores and joined
its threads when it returns). Python cannot emit the barriers that other machines want: refused.
"""

from __future__ import annotations

import mmap
import os
import platform
import time

import torch

from nanocore.protocol.errors import ConfigError

_CACHE_LINE_BYTES = 64
_PAGE_BYTES = 4096
_SPIN_POLLS = 20  # 2 us: yielding costs 0.3 us where nobody wants the core, so it may begin soon
_YIELD_S = 1e-3
_MAX_SLEEP_S = 1e-3


def payload_offset(num_counters: int) -> int:
    """Where the payload begins, in bytes: after the counters, at a page."""
    return -(-num_counters * _CACHE_LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def create_region(num_counters: int, payload_bytes: int) -> int:
    """A descriptor of a new region of zeros, to be inherited (`pass_fds`) by those who share it.

    Raises:
        ConfigError: the machine's memory ordering is not known to suffice. OSError: no memory.
    """
    if platform.machine() != "x86_64":
        raise ConfigError(
            f"ranks on a CPU share memory, which needs an x86-64 machine; this one is "
            f"{platform.machine()}: use one rank, or --device cuda"
        )
    fd = os.memfd_create("nanocore")
    # Taken now, so that a lack of memory is an error here and not a SIGBUS in the middle of a step.
    os.posix_fallocate(fd, 0, payload_offset(num_counters) + payload_bytes)
    return fd


def read_counters(fd: int, num_counters: int) -> list[int]:
    """The counters as they are now, for one who takes no part."""
    words = os.pread(fd, num_counters * _CACHE_LINE_BYTES, 0)
    return list(memoryview(words).cast("Q")[:: _CACHE_LINE_BYTES // 8])


class SharedRegion:
    """A mapping of a region; it ends with the last object that refers to it.

    payload: uint8 [payload_bytes]. counters: int64, a cache line of words for each.
    """

    def __init__(self, fd: int, num_counters: int, payload_bytes: int) -> None:
        offset = payload_offset(num_counters)
        mapping = mmap.mmap(fd, offset + payload_bytes)
        self._words = memoryview(mapping)[:offset].cast("Q")
        self.counters = torch.frombuffer(mapping, dtype=torch.int64, count=offset // 8)
        self.payload = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset)

    def publish(self, counter: int, value: int) -> None:
        """Set a counter that is ours; what was written to the payload before is seen first."""
        self._words[counter * (_CACHE_LINE_BYTES // 8)] = value

    def wait(self, counter: int, value: int) -> None:
        """Return when the counter has reached `value`.

        Polls, soon lets others run between polls (another rank may want this core), then sleeps
        for a share of the time it has waited: a long wait costs no core, and is noticed at most
        1 ms late.
        """
        words, index = self._words, counter * (_CACHE_LINE_BYTES // 8)
        for _ in range(_SPIN_POLLS):
            if words[index] >= value:
                return
        start_s = time.monotonic()
        while words[index] < value:
            waited_s = time.monotonic() - start_s
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min(waited_s / 8, _MAX_SLEEP_S))
