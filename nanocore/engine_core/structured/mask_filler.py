"""Fills the masks of a step's rows on threads of its own, so that they overlap with the model.

Matchers drop the interpreter's lock as they fill. Each thread takes the next row that nobody has,
so a slow one holds up none of the others. One thread uses a filler: it begins, and waits.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Final

import numpy as np

from nanocore.engine_core.structured.matcher import Matcher
from nanocore.engine_core.structured.threads import join_threads, start_thread

logger = logging.getLogger(__name__)

_CORES_PER_THREAD: Final = 8
"""The others are the model's, which computes meanwhile."""
_MAX_NUM_THREADS: Final = 8
_END_LIMIT_S: Final = 5.0


class MaskFiller:
    """Masks of up to max_num_rows rows at a time.

    Args:
        vocab_size: of the model, in tokens. num_threads: by default a few, by the cores there are.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def __init__(self, vocab_size: int, max_num_rows: int, num_threads: int | None = None) -> None:
        # Pages are touched only as rows are filled.
        self._words_MW = np.zeros((max_num_rows, -(-vocab_size // 32)), np.int32)
        self._matchers: Sequence[Matcher] = ()
        self._has_mask: list[bool] = []
        self._bugs: dict[int, str] = {}
        self._left: Iterator[int] = iter(())
        self._num_busy = 0
        self._begun: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            start_thread(self._run, f"masks-{i}") for i in range(num_threads or _num_threads())
        ]

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Begin to fill a mask for each. They, and the masks, are the filler's until `wait`."""
        assert not self._num_busy, "masks are being filled"
        self._matchers = matchers
        self._has_mask = [False] * len(matchers)
        self._bugs = {}
        self._left = iter(range(len(matchers)))  # whoever calls next() has the row for itself
        self._num_busy = min(len(self._threads), len(matchers))
        for _ in range(self._num_busy):
            self._begun.put(True)

    def wait(self) -> tuple[list[int], dict[int, str]]:
        """(which of the matchers have a mask, why others cannot go on); the rest allow all."""
        for _ in range(self._num_busy):
            self._done.get()
        self._num_busy = 0
        failures = {i: one.failure for i, one in enumerate(self._matchers) if one.failure}
        failures |= self._bugs
        has_mask = [i for i, has in enumerate(self._has_mask) if has and i not in failures]
        return has_mask, failures

    def words(self, masks: Sequence[int]) -> bytes:
        """These masks after each other, as `TokenMasks` has them."""
        return b"".join([self._words_MW[i] for i in masks])

    def close(self) -> bool:
        """End the threads, each when it has filled its mask. Idempotent.

        Returns False if one is still filling after seconds.
        """
        for _ in self._threads:
            self._begun.put(False)
        return join_threads(self._threads, _END_LIMIT_S)

    def _run(self) -> None:
        """A thread's body."""
        while self._begun.get():
            for i in self._left:
                self._fill(i)
            self._done.put(None)

    def _fill(self, i: int) -> None:
        """Whatever goes wrong is this row's alone; native code panics with a BaseException."""
        matcher = self._matchers[i]
        try:
            if matcher.failure is None:
                self._has_mask[i] = matcher.fill(self._words_MW[i])
        except BaseException as error:
            # Without the error's text: it may quote what the client sent.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a mask could not be filled: %s\n%s", type(error).__name__, where)
            self._bugs[i] = f"internal error: {type(error).__name__} in its structured output"


def _num_threads() -> int:
    num_cores = len(os.sched_getaffinity(0))
    return min(max(num_cores // _CORES_PER_THREAD, 1), _MAX_NUM_THREADS)
