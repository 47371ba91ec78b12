"""A rank without a model: decodes every plan and answers at once, with a few bytes.

    python benchmarks/no_model_rank.py FD [--echo]

FD is its end of the pipe, with whose other end it goes. With --echo it gives every byte back
instead. `plans.py` starts it.
"""

from __future__ import annotations

import argparse
import socket

from nanocore.worker.executors.pipe import Pipe, encode_frame
from nanocore.worker.messages import Done, ToRank


def answer_plans(end: socket.socket) -> None:
    """Decode what comes and answer, until the other end is closed."""
    pipe: Pipe[ToRank] = Pipe(end, ToRank)
    answer = encode_frame(Done())
    try:
        while True:
            pipe.recv()
            pipe.send_frame(answer)
    except EOFError:
        return


def echo(end: socket.socket) -> None:
    """Give every byte back, until the other end is closed."""
    while byte := end.recv(1):
        end.send(byte)


def main() -> None:
    """Serve the pipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("fd", type=int)
    parser.add_argument("--echo", action="store_true")
    arguments = parser.parse_args()
    end = socket.socket(fileno=arguments.fd)
    (echo if arguments.echo else answer_plans)(end)


if __name__ == "__main__":
    main()
