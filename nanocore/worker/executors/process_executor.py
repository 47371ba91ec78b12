"""The executor whose ranks are processes: plans go to all of them, results come from one.

Every rank applies every plan to its own copy of the persistent batch. The engine and a rank hold
the two ends of one socket pair: a rank ends when its end closes, and the kernel kills it if the
engine is gone. Any rank can report a failure at any time, and a closed pipe is a death. How long a
step may take is the watchdog's matter; the status board tells which rank it waits for.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from nanocore.protocol.errors import StartError, WorkerError
from nanocore.system.child_process import module_command
from nanocore.system.cpu_cores import kernel_cores
from nanocore.worker.communication.links import CHANNEL_DEPTH, channel_buffer_bytes
from nanocore.worker.communication.shared_memory import (
    BUFFER_BYTES,
    create_channel,
    create_group_region,
    progress,
)
from nanocore.worker.devices import select_device, steps_in_flight
from nanocore.worker.executors.pipe import Pipe, encode_frame
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.memory.kv_groups import KVGroup
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import (
    FAILURES,
    AllocateCache,
    Done,
    FromRank,
    Profile,
    RankFailure,
    RankStart,
    ToRank,
    WorkerConfig,
    WorkerInfo,
)

_COMMAND: Final = module_command("nanocore.worker")
_EXIT_TIMEOUT_S: Final = 3.0


class RankProcess:
    """One rank. start: its first message; it inherits the shared memory that this names."""

    def __init__(self, start: RankStart) -> None:
        self.rank = start.rank
        self._num_ranks = start.config.num_ranks
        ours, theirs = socket.socketpair()
        self.pipe: Pipe[FromRank] = Pipe(ours, FromRank)
        fds = theirs.fileno(), start.board_fd, start.reduce_fd, start.receive_fd, start.send_fd
        self._process = subprocess.Popen(
            [*_COMMAND, str(theirs.fileno())],
            pass_fds=[fd for fd in fds if fd >= 0],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": str(len(start.cores))},
        )
        theirs.close()
        self.pidfd = os.pidfd_open(self._process.pid)
        self.pipe.send(start)

    @property
    def name(self) -> str:
        """Name of the rank in messages to users, with its pid."""
        return f"rank {self.rank} of {self._num_ranks} (pid {self._process.pid})"

    def error(self, failure: RankFailure) -> StartError:
        """Exception that stands for what the rank reported."""
        text = f"{self.name}: {failure.message}"
        if failure.traceback:
            text = f"{text}\n{failure.traceback}"
        return FAILURES[failure.exit_code](text)

    def death(self) -> WorkerError:
        """Error that says how the process ended, once its end of the pipe is closed."""
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerError(f"{self.name} closed its pipe")
        if code >= 0:
            return WorkerError(f"{self.name} exited with code {code}")
        name = signal.Signals(-code).name
        hint = "; was it the system's out-of-memory killer?" if -code == signal.SIGKILL else ""
        return WorkerError(f"{self.name} was killed by {name}{hint}")

    def end(self) -> None:
        """Wait for the rank to be gone; one that does not go is killed."""
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        os.close(self.pidfd)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


M = TypeVar("M")
_FAILURE_GRACE_S: Final = 0.2
"""After a rank's death, for another rank to say that it was the cause."""


class ProcessExecutor:
    """Implements `Executor` with config.num_ranks processes.

    Args:
        hidden_size: the model's, to size what passes between stages.
    """

    def __init__(self, config: WorkerConfig, hidden_size: int) -> None:
        self.config = config
        device = select_device(config.device)
        self.max_concurrent_steps = steps_in_flight(config, device)
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        """Where ranks on CUDA devices meet."""
        self._cores = kernel_cores(config.num_ranks)
        self._board_fd = StatusBoard.create(config.num_ranks)
        self._board = StatusBoard(self._board_fd, config.num_ranks)
        tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
        # Of each stage; and from rank t of stage s to rank t of the next one, at [s][t].
        self._reduce_fds = [-1] * pp_size
        self._channel_fds = [[-1] * tp_size for _ in range(pp_size - 1)]
        if device.type == "cpu":
            buffer_bytes = channel_buffer_bytes(config, hidden_size)
            for fds in self._channel_fds:
                fds[:] = [create_channel(buffer_bytes, CHANNEL_DEPTH) for _ in fds]
            if tp_size > 1:
                self._reduce_fds = [
                    create_group_region(tp_size, BUFFER_BYTES) for _ in range(pp_size)
                ]
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="nanocore-ranks-")
        self._ranks: list[RankProcess] = []
        self._poll = select.poll()
        self._steps: deque[int] = deque()
        """Submitted and not collected."""
        self._awaiting: int | None = None
        """The one of them whose masks are not known here yet."""
        self._closing = threading.Event()

    def load_model(self) -> None:
        """Start all ranks, each of which loads its part of the weights."""
        for rank in range(self.config.num_ranks):
            process = RankProcess(self._start_message(rank))
            self._ranks.append(process)
            self._poll.register(process.pipe, select.POLLIN)
        self._gather(Done)

    def profile(self) -> list[WorkerInfo]:
        self._send(Profile())
        return self._gather(WorkerInfo)

    def allocate_kv_cache(
        self, num_slabs: int, max_model_len: int, groups: Sequence[KVGroup] = ()
    ) -> None:
        self._send(
            AllocateCache(num_slabs=num_slabs, max_model_len=max_model_len, groups=[*groups])
        )
        self._gather(Done)

    def submit(self, plan: SchedulerOutput) -> None:
        assert self._awaiting is None, f"step {plan.step}: the one before it awaits masks"
        self._steps.append(plan.step)
        self._awaiting = plan.step if plan.awaits_masks else None
        self._send(plan)

    def sample(self, masks: TokenMasks) -> None:
        assert masks.step == self._awaiting, f"masks of step {masks.step}, not {self._awaiting}"
        self._awaiting = None
        self._send(masks, self._ranks[-self.config.tensor_parallel_size :])

    def collect(self) -> ModelRunnerOutput:
        _, message = self._receive()
        assert isinstance(message, ModelRunnerOutput), message
        self._steps.popleft()
        return message

    def blame(self) -> str:
        """Names the rank that keeps the others waiting: of the first stage that is behind, the one
        that has entered the fewest exchanges."""
        steps = list(self._steps)
        if not steps or steps[0] == self._awaiting:
            return "it hangs in the engine's own process, whose log has the stacks of its threads"
        step, tp_size = steps[0], self.config.tensor_parallel_size
        behind = self._board.behind(step) or [(self.config.num_ranks - tp_size, step)]
        stage = behind[0][0] // tp_size
        suspects = {rank: at for rank, at in behind if rank // tp_size == stage}
        if self._reduce_fds[stage] >= 0:
            entered = progress(self._reduce_fds[stage], tp_size)
            fewest = min(entered[rank % tp_size] for rank in suspects)
            suspects = {r: at for r, at in suspects.items() if entered[r % tp_size] == fewest}
        return "it waits for " + " and ".join(
            f"{self._ranks[rank].name}, which is at step {at}" for rank, at in suspects.items()
        )

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Have a rank's death reported even if no step is in flight, from a thread."""
        watch = threading.Thread(target=self._watch, args=(report,), name="rank-watch", daemon=True)
        watch.start()

    def close(self) -> None:
        """End all ranks: by closing their pipes, and those that stay by force."""
        self._closing.set()
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.end()
        if self._directory is not None:
            self._directory.cleanup()

    def _start_message(self, rank: int) -> RankStart:
        stage, number = divmod(rank, self.config.tensor_parallel_size)
        channels = self._channel_fds
        return RankStart(
            config=self.config,
            rank=rank,
            cores=self._cores[rank],
            board_fd=self._board_fd,
            reduce_fd=self._reduce_fds[stage],
            receive_fd=channels[stage - 1][number] if stage > 0 else -1,
            send_fd=channels[stage][number] if stage < len(channels) else -1,
            rendezvous=str(Path(self._directory.name) / "rendezvous") if self._directory else "",
        )

    def _send(self, message: ToRank, ranks: Sequence[RankProcess] | None = None) -> None:
        """Send to these ranks, or to all. Raises StartError if one is gone.

        A rank whose result does not fit the socket's buffer reads nothing until it is read itself,
        and others may wait for that rank. So all are read while one has no room.
        """
        frame = memoryview(encode_frame(message))
        left = [(rank, frame) for rank in (self._ranks if ranks is None else ranks)]
        while True:
            for index, (rank, rest) in enumerate(left):
                try:
                    left[index] = rank, rank.pipe.send_some(rest)
                except OSError:
                    raise self._failure_of(rank) from None
            left = [(rank, rest) for rank, rest in left if rest]
            if not left:
                return
            full = [rank.pipe for rank, _ in left]
            readable = select.select([rank.pipe for rank in self._ranks], full, [])[0]
            for rank in self._ranks:
                if rank.pipe in readable:
                    try:
                        rank.pipe.take_in()
                    except EOFError:
                        raise self._failure_of(rank) from None

    def _gather(self, kind: type[M]) -> list[M]:
        """One message of this kind from every rank, in order of rank."""
        messages: dict[int, M] = {}
        while len(messages) < len(self._ranks):
            rank, message = self._receive()
            assert isinstance(message, kind), message
            messages[rank.rank] = message
        return [messages[rank] for rank in sorted(messages)]

    def _receive(self) -> tuple[RankProcess, FromRank]:
        """The next message of any rank. Raises StartError: a rank has failed or died."""
        while True:
            taken_in = [rank.pipe.fileno() for rank in self._ranks if rank.pipe.has_taken_in]
            ready = taken_in or dict(self._poll.poll())
            for rank in self._ranks:
                if rank.pipe.fileno() in ready:
                    try:
                        message = rank.pipe.recv()
                    except EOFError:
                        raise self._failure_of(rank) from None
                    if isinstance(message, RankFailure):
                        raise rank.error(message)
                    return rank, message

    def _failure_of(self, dead: RankProcess) -> StartError:
        """Why a rank is gone: its own report, or another rank's, or how its process died."""
        others = [rank for rank in self._ranks if rank is not dead]
        for rank in (dead, *others):
            try:
                while rank.pipe.has_message(_FAILURE_GRACE_S):
                    message = rank.pipe.recv()
                    if isinstance(message, RankFailure):
                        return rank.error(message)
            except (EOFError, OSError):
                continue
        return dead.death()

    def _watch(self, report: Callable[[str], None]) -> None:
        ranks = {rank.pidfd: rank for rank in self._ranks}
        ended = select.select(list(ranks), [], [])[0]
        if not self._closing.is_set():
            report(str(ranks[ended[0]].death()))
