"""What it costs to tell a rank in a process of its own what to compute: bytes and microseconds.

    OMP_NUM_THREADS=1 nice -n -15 python benchmarks/plans.py [--rounds 30]

Plans come from the scheduler, over 16 steps where they are steady ones, so that block crossings are
in. The other end of the pipe is held by `no_model_rank.py`.

encode_us      the plan to a frame; once, for all ranks
send_us        the frame into the pipe; once for each rank
decode_us      the frame to a plan, in the rank
round_trip_us  from the encoded frame to the answer: send, wake up, decode, answer, wake up
echo_us        the floor of that: one byte there and back between two processes, without a message

Writes benchmarks/results/plans.json.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, Final

import msgspec
import numpy as np
from machine import describe_run, nice_sessions, spread, write_report
from no_model_engine import NoModelExecutor

from nanocore.engine_core.config import EngineConfig, SchedulerConfig
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import KVCacheManager
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.executors.pipe import Pipe, encode_frame
from nanocore.worker.messages import FromRank, RunStep, ToRank
from nanocore.worker.plan import SchedulerOutput

RESULTS: Final = Path(__file__).parent / "results" / "plans.json"
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 16384
VOCAB_SIZE: Final = 151_936
MAX_NUM_SEQS: Final = 256
NUM_STEPS: Final = 16
NUM_SAMPLES: Final = 160  # of a figure in a round
FIGURES: Final = ("encode_us", "send_us", "decode_us", "round_trip_us")
_CARD: Final = ModelCard(
    model="none", architecture="none", dtype="none", vocab_size=VOCAB_SIZE, max_model_len=4096,
    eos_token_ids=[], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
)  # fmt: skip
_now_ns = time.perf_counter_ns


class _Engine:
    """A scheduler that plans for an executor without a model."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=65536, max_model_len=4096
        )
        self._scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE))
        limit = QueueLimit(10**9, 10**12, self._scheduler.counters)
        self._admission = Admission(_CARD, EngineConfig(), limit)
        self._executor = NoModelExecutor(MAX_NUM_SEQS, list(range(1000, 2000)))
        self._rng = random.Random(1)

    def add(self, num_requests: int, num_tokens: int) -> None:
        """Queue requests of random tokens."""
        for _ in range(num_requests):
            token_ids = [self._rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
            submit = Submit(
                request_id="r",
                prompt_token_ids=np.array(token_ids, "<i4").tobytes(),
                sampling=EngineSamplingParams(temperature=0.7, top_p=0.95, max_tokens=1000),
            )
            handle = self._rng.getrandbits(31)
            self._scheduler.add(self._admission.build(submit, handle, client=1))

    def plans(self, count: int) -> list[SchedulerOutput]:
        """The next steps'."""
        plans = []
        for _ in range(count):
            plans.append(self._scheduler.schedule())
            self._scheduler.update(self._executor.execute(plans[-1]))
        return plans


def steady_plans() -> list[SchedulerOutput]:
    """256 requests decode."""
    engine = _Engine()
    engine.add(MAX_NUM_SEQS, 128)
    engine.plans(2)
    return engine.plans(NUM_STEPS)


def one_prompt_plans() -> list[SchedulerOutput]:
    """255 requests decode, and a prompt of 1,024 tokens is admitted."""
    engine = _Engine()
    engine.add(MAX_NUM_SEQS - 1, 128)
    engine.plans(2)
    engine.add(1, 1024)
    return engine.plans(1)


def many_prompts_plans() -> list[SchedulerOutput]:
    """256 prompts of 128 tokens are admitted at once."""
    engine = _Engine()
    engine.add(MAX_NUM_SEQS, 128)
    return engine.plans(1)


CASES: Final[dict[str, tuple[str, Callable[[], list[SchedulerOutput]]]]] = {
    "steady_256": ("256 requests decode", steady_plans),
    "admit_1x1024": ("one prompt of 1,024 tokens is admitted beside 255 decodes", one_prompt_plans),
    "admit_256x128": ("256 prompts of 128 tokens are admitted", many_prompts_plans),
}


class Peer:
    """The process at the other end, and our end. flags: of `no_model_rank.py`."""

    def __init__(self, *flags: str) -> None:
        self.end, theirs = socket.socketpair()
        self.pipe: Pipe[FromRank] = Pipe(self.end, FromRank)
        script = str(Path(__file__).with_name("no_model_rank.py"))
        command = [sys.executable, script, str(theirs.fileno()), *flags]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        self._process.wait()


def echo_us(peer: Peer, count: int) -> float:
    """One byte there and back, the mean of several."""
    start_ns = _now_ns()
    for _ in range(count):
        peer.end.send(b"\0")
        peer.end.recv(1)
    return round((_now_ns() - start_ns) / 1e3 / count, 2)


def plan_us(peer: Peer, plans: list[SchedulerOutput], count: int) -> dict[str, float]:
    """Means over the plans, of about `count` samples."""
    decoder = msgspec.msgpack.Decoder[ToRank](ToRank)
    spent_ns = dict.fromkeys(FIGURES, 0)
    repeated = plans * max(1, count // len(plans))
    for plan in repeated:
        t0 = _now_ns()
        frame = encode_frame(RunStep(plan))
        t1 = _now_ns()
        peer.pipe.send_frame(frame)
        t2 = _now_ns()
        peer.pipe.recv()
        t3 = _now_ns()
        body = bytearray(memoryview(frame)[4:])
        t4 = _now_ns()
        message = decoder.decode(body)
        t5 = _now_ns()
        assert message == RunStep(plan)
        for name, ns in zip(FIGURES, (t1 - t0, t2 - t1, t5 - t4, t3 - t1), strict=True):
            spent_ns[name] += ns
    return {name: round(ns / 1e3 / len(repeated), 2) for name, ns in spent_ns.items()}


def measure(num_rounds: int, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    """Every case, in turn, several rounds."""
    plans = {name: make() for name, (_, make) in CASES.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    echoes = []
    with Peer("--echo") as echo_peer, Peer() as rank_peer:
        echo_us(echo_peer, num_samples)  # when the peers have started
        plan_us(rank_peer, plans["steady_256"], num_samples)
        for _ in range(num_rounds):
            echoes.append(echo_us(echo_peer, num_samples))
            for name in CASES:
                rounds[name].append(plan_us(rank_peer, plans[name], num_samples))
    summary: dict[str, Any] = {"echo_us": spread(echoes)}
    for name, (what, _) in CASES.items():
        sizes = [len(encode_frame(RunStep(plan))) for plan in plans[name]]
        figures = {key: spread([r[key] for r in rounds[name]]) for key in rounds[name][0]}
        summary[name] = {
            "what": what,
            "mean_bytes": round(mean(sizes)),
            "max_bytes": max(sizes),
            **figures,
        }
    return summary


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with nice_sessions():
        summary = measure(arguments.rounds)
    echo = summary["echo_us"]
    print(f"echo of a byte: {echo['median']:.1f} us ({echo['min']:.1f}-{echo['max']:.1f})")
    for name in CASES:
        row = summary[name]
        print(f"{name}: {row['what']}; {row['mean_bytes']} bytes, at most {row['max_bytes']}")
        for key in FIGURES:
            figure = row[key]
            span = f"{figure['min']:.1f}-{figure['max']:.1f}"
            print(f"  {key:14} {figure['median']:8.1f} ({span})")
    write_report(arguments.out, {**describe_run(), **summary})


if __name__ == "__main__":
    main()
