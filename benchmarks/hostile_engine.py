"""An engine under observation, and what a phase of a run was like for those who used it."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
from hostile_messages import frames, hello

from nanocore.protocol.codec import client_decoder
from nanocore.protocol.messages import Op, Reply
from nanocore.protocol.sockets import ClientKeys, PeerSocket

TIMEOUT_S: Final = 60.0
_FAILURES: Final = ("Traceback", "could not be handled", "failed", "Assertion", "Error:", "libzmq")


class Engine:
    """An engine process with the demo model, under observation.

    folder: for its log, and for its socket if it has no other endpoint. curve_dir: a client's keys.
    """

    def __init__(
        self, folder: Path, *flags: str, endpoint: str | None = None, curve_dir: Path | None = None
    ) -> None:
        self.endpoint = endpoint or f"ipc://{folder / 'e' / 'engine.sock'}"
        self.curve_dir = curve_dir
        self._keys = None if curve_dir is None else ClientKeys.load(curve_dir)
        self._stderr = folder / "log"
        with self._stderr.open("wb") as log:
            command = [sys.executable, "-m", "nanocore.engine_core", "--listen", self.endpoint]
            # In bfloat16 two tokens are often equally likely, and who else is in the batch decides.
            command += ["--dtype", "float32"]
            self._process = subprocess.Popen([*command, *flags], stderr=log)
        self._proc = Path(f"/proc/{self._process.pid}")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def stop(self) -> int:
        """End it; returns the exit code."""
        self._process.terminate()
        return self._process.wait(TIMEOUT_S)

    def log(self) -> list[str]:
        """The lines it has logged so far."""
        return self._stderr.read_text().splitlines()

    def failures(self) -> list[str]:
        """Lines of its log that tell of exceptions and failed assertions."""
        return [line for line in self.log() if any(sign in line for sign in _FAILURES)]

    def leaked_descriptors(self, before: int) -> int:
        """Descriptors above those at the start, once there are none, or TIMEOUT_S have passed."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (leaked := self.num_descriptors() - before) > 0 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return max(0, leaked)

    def num_descriptors(self) -> int:
        """Open descriptors."""
        return len(list((self._proc / "fd").iterdir()))

    def memory_mib(self) -> dict[str, float]:
        """Resident now, and at its peak."""
        lines = (self._proc / "status").read_text().splitlines()
        values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return {name: round(int(values[key]) / 1024, 1)
                for name, key in (("rss", "VmRSS"), ("peak_rss", "VmHWM"))}  # fmt: skip

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def stats(self) -> dict[str, Any]:
        """Its own counters; waits for it to serve."""
        peer, decoder = PeerSocket(self.endpoint, self._keys), client_decoder()
        peer.send(hello())
        peer.send(frames(Op.CONTROL, call_id=1, operation="stats"))
        try:
            while (answer := peer.receive(TIMEOUT_S)) is not None:
                message = decoder.decode(answer)
                if isinstance(message, Reply):
                    return msgspec.structs.asdict(message.stats)
        finally:
            peer.send(frames(Op.BYE))
            peer.close()
        raise TimeoutError(f"the engine says nothing for {TIMEOUT_S} s")


class Phase:
    """A stretch of time of one run, and what happened in it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.start_s = time.monotonic()
        self._start_cpu_s = engine.cpu_s()

    def end(self) -> Phase:
        """Its end is now."""
        self.end_s = time.monotonic()
        self.engine_cores = (self._engine.cpu_s() - self._start_cpu_s) / self.length_s
        return self

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s

    def figures(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Times between tokens, and to the first one, of the bystanders' requests within it."""
        spans = [span for request in requests for span in enumerate(pairwise(request["times_s"]))]
        inside = [(i, (end - start) * 1e3) for i, (start, end) in spans
                  if self.start_s <= start and end <= self.end_s]  # fmt: skip
        gaps = sorted(ms for i, ms in inside if i > 0)
        first = sorted(ms for i, ms in inside if i == 0)
        return {
            "seconds": round(self.length_s, 1),
            "engine_cores": round(self.engine_cores, 2),
            "num_requests": len(first),
            "num_gaps": len(gaps),
            **{f"itl_ms_{name}": _quantile(gaps, q) for name, q in _QUANTILES.items()},
            **{f"ttft_ms_{name}": _quantile(first, q) for name, q in _QUANTILES.items()},
        }


_QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def _quantile(ordered: list[float], q: float) -> float | None:
    return round(ordered[int(q * (len(ordered) - 1))], 2) if ordered else None
