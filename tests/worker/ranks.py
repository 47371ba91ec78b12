"""Several ranks in one process: a thread each, over a real region of shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.communication.shared_memory import (
    SharedRegion,
    ShmCommunicator,
    create_group_region,
)

T = TypeVar("T")
TIMEOUT_S = 60.0


def run_ranks(
    size: int,
    function: Callable[[Communicator], T],
    *,
    buffer_bytes: int = 1 << 16,
    timeout_s: float = TIMEOUT_S,
) -> list[T]:
    """function(communicator) of every rank, in order of ranks; raises what the first to fail did.

    Raises:
        TimeoutError: some rank did not return.
    """
    if size == 1:
        return [function(SingleRank())]
    fd = create_group_region(size, buffer_bytes)
    communicators = [ShmCommunicator(fd, rank, size, buffer_bytes) for rank in range(size)]
    region = SharedRegion(fd, size, 1)
    os.close(fd)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)

    def run(rank: int) -> None:
        try:
            results[rank] = function(communicators[rank])
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for _ in threads:
        if not ended.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            errors.append(TimeoutError(f"of {size} ranks, only {sorted(results)} returned"))
        if errors:
            # Whoever waits for the one that failed goes on, with nonsense, and ends.
            for rank in range(size):
                region.publish(rank, 2**62)
            break
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def same_on_every_rank(results: list[torch.Tensor]) -> torch.Tensor:
    """The one result that all ranks have, to the bit."""
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return results[0]
