"""What an all_reduce between processes of this host costs: through shared memory, and with gloo.

    nice -n -15 python benchmarks/all_reduce.py [--ranks 2,4] [--rounds 7]

Every rank is a process with one torch thread. In each round and for each size, ours and gloo's
calls are timed one after the other; a round's figure is the median of its calls on rank 0. Writes
benchmarks/results/all-reduce.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from machine import describe_run, nice_sessions, spread, write_report
from torch import Tensor

from nanocore.worker.communication.process_group import ProcessGroupCommunicator
from nanocore.worker.communication.shm_communicator import (
    BUFFER_BYTES,
    ShmCommunicator,
    create_region,
)

RESULTS: Final = Path(__file__).parent / "results" / "all-reduce.json"
SIZES: Final = {"4 KB": 4 << 10, "16 KB": 16 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20,
                "8 MB": 8 << 20}  # fmt: skip
BYTES_PER_ROUND: Final = 32 << 20
MAX_CALLS: Final = 200


def run_rank(fd: int, store: Path, rank: int, size: int, rounds: int) -> dict[str, Any]:
    """All figures in microseconds, as size to implementation to one value per round."""
    torch.set_num_threads(1)
    gloo = ProcessGroupCommunicator(store, rank, size, [range(size)], torch.device("cpu"))
    ours = ShmCommunicator(fd, rank, size, BUFFER_BYTES)
    figures: dict[str, Any] = {name: {"shared memory": [], "gloo": []} for name in SIZES}
    for number in range(rounds + 1):
        for name, num_bytes in SIZES.items():
            x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
            calls = min(MAX_CALLS, max(4, BYTES_PER_ROUND // num_bytes))
            for kind, reduce in (("shared memory", ours.all_reduce), ("gloo", gloo.all_reduce)):
                dist.barrier()
                taken_us = time_calls(reduce, x, calls)
                if number:  # the first round warms up
                    figures[name][kind].append(taken_us)
    gloo.close()
    return figures


def time_calls(reduce: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(calls):
        start_s = time.perf_counter()
        reduce(x)
        times.append((time.perf_counter() - start_s) * 1e6)
    return median(times)


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Figures of a group of so many ranks."""
    fd = create_region(size, BUFFER_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, f"--rounds={rounds}",
                 f"--rank={fd},{folder}/store,{rank},{size}"],
                pass_fds=[fd], stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            )
            for rank in range(size)
        ]  # fmt: skip
        with nice_sessions():
            output = ranks[0].communicate()[0]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed: see above")
    os.close(fd)
    return {
        name: {kind: spread(values) for kind, values in row.items()}
        for name, row in json.loads(output).items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="2,4", help="sizes of groups, by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        fd, store, rank, size = arguments.rank.split(",")
        print(json.dumps(run_rank(int(fd), Path(store), int(rank), int(size), arguments.rounds)))
        return
    groups: dict[str, Any] = {}
    print("ranks     size   shared memory, us: median (range)     gloo")
    for size in map(int, arguments.ranks.split(",")):
        groups[str(size)] = measure(size, arguments.rounds)
        for name, row in groups[str(size)].items():
            cells = (f"{f['median']:.0f} ({f['min']:.0f}-{f['max']:.0f})" for f in row.values())
            print(f"{size:5} {name:>8}   " + "".join(f"{cell:35}" for cell in cells))
    write_report(arguments.out, {**describe_run(), "dtype": "bfloat16", "unit": "us",
                                 "ranks": groups})  # fmt: skip


if __name__ == "__main__":
    main()
