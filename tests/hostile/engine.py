"""An engine under observation: its log, its descriptors, its counters."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from nanocore.protocol.codec import client_decoder
from nanocore.protocol.messages import Op, Reply
from nanocore_conformance.peer_socket import PeerSocket
from tests.hostile.messages import frames, hello

TIMEOUT_S: Final = 60.0
_FAILURES: Final = ("Traceback", "could not be handled", "failed", "Assertion", "Error:", "libzmq")


class Engine:
    """An engine process with the demo model, under observation. folder: for its log and socket."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.endpoint = f"ipc://{folder / 'e' / 'engine.sock'}"
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

    def stats(self) -> dict[str, Any]:
        """Its own counters; waits for it to serve."""
        peer, decoder = PeerSocket(self.endpoint), client_decoder()
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
