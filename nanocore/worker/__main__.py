"""`python -m nanocore.worker FD`: a rank in a process of its own; FD is its end of the pipe.

Started by the engine and by nobody else. It ends when the pipe's other end closes, and is killed if
the engine is gone; signals that end an engine in order leave its ranks to the engine.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from nanocore.protocol.errors import CacheMemoryError, StartError, WorkerError, is_out_of_memory
from nanocore.system.child_process import signal_at_parent_death
from nanocore.system.cpu_cores import FLOATING
from nanocore.system.logs import start_log
from nanocore.worker.executors.pipe import Pipe
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.plan import SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import (
    AllocateCache,
    Done,
    Profile,
    RankFailure,
    RankStart,
    ToRank,
)
from nanocore.worker.step.pending_output import PendingOutput

if TYPE_CHECKING:
    from nanocore.worker.worker import Worker

_LOOK_AGAIN_S: Final = 50e-6
"""How long a rank whose GPU works waits for a plan before it looks at the GPU again."""


def main() -> None:
    """Serve the engine at the other end of the pipe until it is gone; 70 if the rank fails."""
    fd = int(sys.argv[1])
    signal_at_parent_death(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    threading.Thread(
        target=_leave_with_engine, args=(fd,), name="engine-watch", daemon=True
    ).start()
    pipe: Pipe[ToRank] = Pipe(end, ToRank)
    try:
        _run(pipe)
    except EOFError:
        return
    except Exception as error:
        with suppress(OSError):  # the engine may be leaving already, for another rank's failure
            pipe.send(_failure(error))
        os._exit(StartError.exit_code)  # at once: other threads may be in the middle of a step


def _run(pipe: Pipe[ToRank]) -> None:
    start = pipe.recv()
    assert isinstance(start, RankStart)
    config, rank = start.config, start.rank
    start_log(f"rank {rank} of {config.num_ranks}", config.log_format)
    # Ranks that reduce spin for each other; two on one core take twice as long, measured.
    if FLOATING not in start.cores:
        os.sched_setaffinity(0, start.cores)
    import torch  # seconds, and the engine's death must be noticed meanwhile

    from nanocore.worker.worker import Worker

    torch.set_num_threads(len(start.cores))
    board = StatusBoard(start.board_fd, config.num_ranks)
    worker = Worker(config, start)
    worker.load_model()
    pipe.send(Done())
    # The first rank of the last stage reports for all.
    reports = rank == config.num_ranks - config.tensor_parallel_size
    serve(pipe, worker, board, rank, reports)


def serve(
    pipe: Pipe[ToRank], worker: Worker, board: StatusBoard, rank: int, reports: bool
) -> NoReturn:
    """Handle the engine's messages. reports: this rank sends the results.

    Raises EOFError: the engine is gone.
    """
    begun: deque[tuple[int, PendingOutput]] = deque()
    while True:
        # A step that is done goes first; until one is, the next message is waited for beside it. If
        # the oldest awaits masks, that message brings them.
        while begun and not begun[0][1].awaits_masks:
            if begun[0][1].is_done():
                step, pending = begun.popleft()
                output = pending.wait()
                board.finish(rank, step)
                if reports:
                    pipe.send(output)
            elif pipe.has_message(_LOOK_AGAIN_S):
                break
        match pipe.recv():
            case Profile():
                pipe.send(worker.profile())
            case AllocateCache() as size:
                worker.allocate_kv_cache(size.num_slabs, size.max_model_len, size.groups)
                pipe.send(Done())
            case SchedulerOutput() as plan:
                board.begin(rank, plan.step)
                begun.append((plan.step, worker.begin(plan)))
            case TokenMasks() as masks:
                begun[-1][1].sample(masks)
            case unexpected:
                raise AssertionError(f"{type(unexpected).__name__} to a rank that runs")


def _leave_with_engine(fd: int) -> None:
    """End the process when the engine's end of the pipe closes, whatever a step waits for."""
    poll = select.poll()
    poll.register(fd, 0)  # only that the other end is gone
    poll.poll()
    os._exit(0)


def _failure(error: Exception) -> RankFailure:
    if isinstance(error, StartError):
        return RankFailure(exit_code=error.exit_code, message=str(error))
    return RankFailure(
        exit_code=(CacheMemoryError if is_out_of_memory(error) else WorkerError).exit_code,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


if __name__ == "__main__":
    main()
