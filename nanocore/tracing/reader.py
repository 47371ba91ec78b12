"""Reads a step trace line by line, also while it is written, and tells runs of engines apart.

An engine appends to what is there, so a file may hold several runs. One that was killed leaves a
cut line, to which the next one appends its first; a file that is being written ends with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from nanocore.tracing.step import Step, TraceError

_LINE_START: Final = b'{"step":'
_SHOWN_CHARS: Final = 60


class TraceReader:
    """Iterates over a trace's steps, each with the number of its run, from 1.

    num_cut_lines: lines that a killed engine, or one that is writing, left unfinished.

    Raises, when iterated:
        TraceError: there is no such file, or a line is no step.
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
        """The step of a line that is not one: behind a cut one's, or none if it is cut itself."""
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
            f"{self._path} is no step trace: line {number} ({shown!r}): {error}; name a FILE "
            "that nanocore-engine --step-trace has written"
        )
