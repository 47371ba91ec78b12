"""A driver of an engine: its process group, its answers, and its end, all bounded in time.

It speaks benchmarks/peers/line_protocol. Engines of a pair stay up and take turns; an idle one
waits on its standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.gpu.run import ROOT, child_environment

_LOG_TAIL_BYTES: Final = 8000
_STOP_TIMEOUT_S: Final = 15.0


class PeerError(RuntimeError):
    """An engine did not do what it was asked; says which, and how its log ends."""


class PeerProcess:
    """A driver from its start to its end. Use with `with`.

    Args:
        module: the driver's. arguments: its flags. path: folders to find packages in first.
        log: file for all that it prints beside its answers.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], path: Sequence[Path], log: Path
    ) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        environment = child_environment()
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment["PYTHONPATH"]])
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=ROOT,
                process_group=0,
            )

    def wait_ready(self, limit_s: float) -> dict[str, Any]:
        """Versions and settings, once the engine is loaded."""
        return self._read(limit_s)

    def run(self, prompts: list[list[int]], num_outputs: list[int], limit_s: float) -> float:
        """Seconds that the engine took for a workload.

        Raises:
            PeerError: it failed, took too long, or gave other than the tokens asked for.
        """
        requests = list(zip(prompts, num_outputs, strict=True))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # _read says why
            self._process.stdin.write(json.dumps({"requests": requests}).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(limit_s)
        if answer["num_output_tokens"] != num_outputs:
            found = sum(answer["num_output_tokens"])
            raise PeerError(f"{self.name}: {found} tokens instead of {sum(num_outputs)}")
        return float(answer["wall_s"])

    def close(self) -> None:
        """End the driver, kindly and then firmly. Idempotent."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, limit_s: float) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        end_s, fd = time.monotonic() + limit_s, self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise PeerError(f"{self.name}: no answer in {limit_s:.0f} s\n{self._log_tail()}")
            data = os.read(fd, 1 << 16)
            if not data:
                code = self._process.wait()
                raise PeerError(f"{self.name}: ended with {code}\n{self._log_tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
