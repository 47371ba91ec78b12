"""TraceReader: reads a step trace line by line, even while it is written, and separates runs.

An engine appends to an existing file, so a file may hold several runs. A killed engine leaves an
unfinished line, which the next engine continues with its first; a file in use ends with one.

Unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

_LINE_START: Final = b'{"step":'
_SHOWN_CHARS: Final = 60


class TraceError(ValueError):
    """The trace cannot be read, or does not contain what is asked for."""


class Arrival(msgspec.Struct, frozen=True):
    """A request that reached the scheduler. Times are seconds of the trace.

    received_s: when SUBMIT was read from the socket. compiled_s: when its structured output was
    compiled, if it had to wait for that. arrived_s: when the scheduler got it. leader: the sibling
    sample that computes the prompt.
    """

    id: str
    session: int
    priority: int
    prompt_tokens: int
    received_s: float
    arrived_s: float
    compiled_s: float | None = None
    leader: str | None = None


class Blocked(msgspec.Struct, frozen=True):
    """The first request in line that a step left waiting, and what it lacked."""

    id: str
    by: str


class LostHits(msgspec.Struct, frozen=True):
    """Tokens of a cached prefix that this group of layers had let go of."""

    tokens: int
    group: str


class GroupBlocks(msgspec.Struct, frozen=True):
    """Blocks of a group of layers, after a step."""

    name: str
    free_blocks: int
    total_blocks: int


class Step(msgspec.Struct):
    """One line. t_s: when the step was planned. `scheduled` and `computed` stay bytes until needed,
    since most steps repeat those of the step before. accepted: drafts, by request."""

    step: int
    t_s: float
    duration_ms: float
    scheduled: msgspec.Raw
    computed: msgspec.Raw
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    finished: list[str]
    cached: dict[str, int]
    num_running: int
    num_waiting: int
    free_blocks: int
    total_blocks: int
    token_budget: int
    arrived: list[Arrival]
    first: list[str]
    sent: dict[str, float]
    preempted_by: dict[str, str]
    blocked: Blocked | None
    lost: dict[str, LostHits] = {}
    groups: list[GroupBlocks] = []
    accepted: dict[str, int] = {}

    @property
    def end_s(self) -> float:
        """When the step's result was processed."""
        return self.t_s + self.duration_ms / 1e3


_COUNTS = msgspec.json.Decoder(dict[str, int])


def counts(raw: msgspec.Raw) -> dict[str, int]:
    """Decode `scheduled` or `computed`: tokens by request id."""
    return _COUNTS.decode(raw)


class TraceReader:
    """Iterates over a trace's steps, each with the number of its run, from 1.

    num_cut_lines: unfinished lines so far.

    Raises, when iterated:
        TraceError: the file cannot be read, or a line is not a step.
    """

    def __init__(self, path: str) -> None:
        self.num_cut_lines = 0
        self._path = path
        self._decoder = msgspec.json.Decoder(Step)

    def __iter__(self) -> Iterator[tuple[int, Step]]:
        run, last_step, decode = 1, 0, self._decoder.decode
        try:
            with open(self._path, "rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        step = decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        found = self._mended(number, line, error)
                        if found is None:
                            continue
                        step = found
                    if step.step <= last_step:
                        run += 1
                    last_step = step.step
                    yield run, step
        except OSError as error:
            raise TraceError(
                f"{self._path}: {error.strerror}; name the FILE of nanocore-engine --step-trace"
            ) from None

    def _mended(self, number: int, line: bytes, error: Exception) -> Step | None:
        """Return the step behind an unfinished one; None if the line itself is unfinished."""
        if not line.strip():
            return None
        if line.startswith(_LINE_START):
            start = line.rfind(_LINE_START)
            if start > 0:
                try:
                    step = self._decoder.decode(line[start:])
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    pass
                else:
                    self.num_cut_lines += 1
                    return step
            if not line.endswith(b"\n"):
                self.num_cut_lines += 1
                return None
        elif not line.endswith(b"\n") and _LINE_START.startswith(line):
            self.num_cut_lines += 1
            return None
        shown = line[:_SHOWN_CHARS].decode(errors="backslashreplace").strip()
        raise TraceError(
            f"{self._path} is not a step trace: line {number} ({shown!r}): {error}; name a FILE "
            "that nanocore-engine --step-trace has written"
        )
