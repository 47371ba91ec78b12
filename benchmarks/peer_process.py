"""One engine of a comparison: its driver's process, and whose turn it is.

The driver (see peers/line_protocol.py) leads a process group of its own in our session. Between
its turns the group is stopped, so that spinning threads and pollers cost the others nothing; should
whoever compares die, the kernel ends stopped groups that it leaves behind (SIGHUP). What the driver
prints beside its answers goes to a log, whose end is quoted when the driver fails.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:  # compare.py finds it beside itself, gpu/ in a package
    from benchmarks.workloads import BenchmarkRequest

ANSWER_TIMEOUT_S: Final = 1800.0
_STOP_TIMEOUT_S: Final = 20.0
_LOG_TAIL_BYTES: Final = 8000


class PeerError(RuntimeError):
    """An engine could not be run; says which, why, and what to do."""


class NoAnswerError(PeerError):
    """An engine took longer than it may."""


@dataclass(frozen=True, slots=True)
class PeerCommand:
    """How to start a driver. environment: what differs from ours. remedy: if it does not start."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One run of a workload; items of the lists are requests, in the order of submission.

    read_gb_per_s: what memory gave beside it, if that was measured.
    """

    wall_s: float
    ttft_s: list[float]
    tpot_s: list[float]
    num_output_tokens: list[int]
    first_token_ids: list[int]
    read_gb_per_s: float = 0.0


class PeerProcess:
    """A driver, from its start to its end. Use with `with`; starts at once, and is then parked."""

    def __init__(self, peer: PeerCommand, log: Path) -> None:
        self.name = peer.name
        self._remedy = peer.remedy
        self._log = log
        self._buffer = b""
        self._may_be_stopped = False
        try:
            with log.open("wb") as stderr:
                self._process = subprocess.Popen(
                    peer.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=os.environ | peer.environment,
                    process_group=0,
                )
        except OSError as error:
            raise PeerError(f"{self.name}: cannot start: {error}. {self._remedy}") from error

    @property
    def pid(self) -> int:
        """The driver's process id."""
        return self._process.pid

    def wait_ready(self, limit_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the engine is loaded, and park it; returns versions and settings."""
        ready = self._read_line(limit_s)
        self._may_be_stopped = ready.pop("may_be_stopped")
        self._signal(signal.SIGSTOP)
        return ready

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the engine's processes run within this block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def run(
        self,
        requests: Sequence[BenchmarkRequest],
        limit_s: float = ANSWER_TIMEOUT_S,
        sampling: Mapping[str, float] | None = None,
    ) -> PeerRun:
        """Run a workload, in the engine's turn; for `sampling` see `Workload`.

        Raises:
            PeerError: the engine failed, or gave other than the tokens asked for.
        """
        pairs = [(request.prompt_token_ids, request.num_output_tokens) for request in requests]
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # _read_line says why
            line = json.dumps({"requests": pairs, "sampling": dict(sampling or {})})
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        run = PeerRun(**self._read_line(limit_s))
        wanted = [request.num_output_tokens for request in requests]
        if run.num_output_tokens != wanted:
            found = run.num_output_tokens
            raise PeerError(f"{self.name}: requests ended with {found} tokens instead of {wanted}")
        return run

    def close(self) -> None:
        """End the driver, kindly and then firmly. Idempotent."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # the usual case: the group has ended
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._may_be_stopped and self._process.poll() is None:
            os.killpg(self.pid, number)

    def _read_line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise NoAnswerError(str(self._error(f"no answer in {limit_s:.0f} s")))
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise self._error(f"its driver ended with exit code {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self, what: str) -> PeerError:
        tail = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return PeerError(f"{self.name}: {what}. {self._remedy}\n--- end of its log:\n{tail}")
