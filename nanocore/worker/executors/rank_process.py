"""A rank in a process of its own, as the engine sees it: started, spoken to, and ended.

The engine and a rank hold the two ends of one socket pair. A rank ends when its end closes, and the
kernel kills it if the engine is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Final

from nanocore.protocol.errors import (
    CacheMemoryError,
    ConfigError,
    ModelFileError,
    StartError,
    WorkerError,
)
from nanocore.system.child_process import module_command
from nanocore.worker.executors.pipe import Pipe
from nanocore.worker.messages import FailureKind, FromRank, RankFailure, RankStart

_ERRORS: Final[dict[FailureKind, type[StartError]]] = {
    "config": ConfigError,
    "model_file": ModelFileError,
    "memory": CacheMemoryError,
    "internal": WorkerError,
}
_COMMAND: Final = module_command("nanocore.worker")
_EXIT_TIMEOUT_S: Final = 3.0


class RankProcess:
    """One rank.

    Args:
        start: its first message. inherited_fds: shared memory that it names.
    """

    def __init__(self, start: RankStart, inherited_fds: list[int]) -> None:
        self.rank = start.rank
        self._num_ranks = start.config.num_ranks
        ours, theirs = socket.socketpair()
        self.pipe: Pipe[FromRank] = Pipe(ours, FromRank)
        self._process = subprocess.Popen(
            [*_COMMAND, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *inherited_fds],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": str(len(start.cores))},
        )
        theirs.close()
        self.pidfd = os.pidfd_open(self._process.pid)
        self.pipe.send(start)

    @property
    def name(self) -> str:
        """How messages to users name the rank, with its pid."""
        return f"rank {self.rank} of {self._num_ranks} (pid {self._process.pid})"

    def error(self, failure: RankFailure) -> StartError:
        """What the rank reported, as the exception to raise here."""
        text = f"{self.name}: {failure.message}"
        if failure.traceback:
            text = f"{text}\n{failure.traceback}"
        return _ERRORS[failure.kind](text)

    def death(self) -> WorkerError:
        """How the process ended, once its end of the pipe is closed."""
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerError(f"{self.name} closed its pipe")
        if code >= 0:
            return WorkerError(f"{self.name} exited with code {code}")
        name = signal.Signals(-code).name
        hint = "; was it the system's out-of-memory killer?" if -code == signal.SIGKILL else ""
        return WorkerError(f"{self.name} was killed by {name}{hint}")

    def close_pipe(self) -> None:
        """Close our end of the pipe, at which the rank ends by itself."""
        self.pipe.close()

    def end(self) -> None:
        """Wait for the rank to be gone; one that does not go is killed."""
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        os.close(self.pidfd)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
