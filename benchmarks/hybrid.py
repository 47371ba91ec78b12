"""Models with Gated DeltaNet: speed next to other engines, long sessions, prefix hits, and memory.

    nice -n -15 python benchmarks/hybrid.py --peers llama.cpp --llama-server path/to/llama-server

- speed: prompts of 512 tokens with 64 new ones, 1 and 16 of them at once; engines take turns. A
  step is the time per token of the request that started last, since all rows decode then. Next to
  ours is a forecast: bytes that a step moves by the memory's bandwidth, or operations by FLOP/s if
  that is longer. States are read and written. Both rates are measured before each turn.
- turns: TTFT of each turn of a session, in which a prompt is all that was said before and 200 new
  tokens, next to a model of the same shape with attention in every layer.
- hits: how many of 64 requests with a shared prefix find some of it, after one request with that
  prefix (warm) or all submitted together (cold). The prefixes are those of vllm#45238.
- memory: what `--check` lists, next to what the engine takes once its cache is full.

Writes benchmarks/results/hybrid.json; parts that are not measured keep their figures of before.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from checkpoints import Checkpoints
from compare_engines import OURS, add_arguments, engine_commands
from kill_storm import engine_pid
from models import model_folder
from peer_process import PeerError, PeerProcess, PeerRun
from report import describe_run, positive, spread, table, with_range, write_report
from workloads import BenchmarkRequest

from nanocore.client import LLM, SamplingParams
from nanocore.engine_core.cli import parse_config
from nanocore.worker.cost.machine_speed import measure_speed
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from nanocore.worker.dry_run import dry_run

RESULTS: Final = Path(__file__).parent / "results" / "hybrid.json"
PARTS: Final = ("speed", "turns", "hits", "memory")
STREAMS: Final = (1, 16)
PROMPT_TOKENS: Final = 512
NEW_TOKENS: Final = 64
TURNS: Final = 12
SAID_TOKENS: Final = 200
ANSWER_TOKENS: Final = 50
PREFIX_TOKENS: Final = (1600, 1700)
NUM_SHARING: Final = 64
OWN_TOKENS: Final = 50
_STRETCH_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Model:
    """The measured model. dense: the folder of its like with attention in every layer."""

    folder: Path
    dense: Path
    vocab_size: int

    def draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        return rng.choices(range(self.vocab_size), k=num_tokens)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def model_cost(folder: Path) -> ModelCost:
    """What a step takes, counted from the shapes."""
    (rank,) = dry_run(parse_config([]).for_device("cpu").worker_config(str(folder), 2048))
    assert rank.cost is not None
    return rank.cost


def forecast_ms(cost: ModelCost, speed: MachineSpeed, num_rows: int, num_tokens: int) -> float:
    """Expected time of a step in which rows that have so many tokens decode."""
    kv_bytes = sum(kind.seen(num_tokens) * kind.kv_bytes for kind in cost.attention)
    pair_flops = sum(kind.seen(num_tokens) * kind.pair_flops for kind in cost.attention)
    num_bytes = cost.read_weight_bytes(num_rows) + num_rows * (2 * cost.state_bytes + kv_bytes)
    flops = num_rows * (cost.token_flops + 2 * cost.head_params + pair_flops)
    return 1e3 * max(num_bytes / speed.bytes_per_s, flops / speed.flops_per_s)


def measure_speed_of_engines(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every engine on the same prompts, in an order that rotates."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanocore-hybrid-")))
        commands = engine_commands(
            arguments, Checkpoints(model.folder, place), arguments.engine, max(STREAMS)
        )
        engines, described = [], {}
        for number, command in enumerate(commands):  # one by one: loading takes all cores
            engine = stack.enter_context(PeerProcess(command, place / f"{number}.log"))
            described[engine.name] = engine.wait_ready()
            engines.append(engine)
        found: dict[str, Any] = {"engines": described, "streams": {}}
        for num_streams in STREAMS:
            runs = run_rounds(model, engines, num_streams, arguments.reps)
            found["streams"][str(num_streams)] = summarize(model, num_streams, runs)
    return found


Turns = list[tuple[PeerRun, MachineSpeed]]
"""An engine's, each with what the machine gave before it."""


def run_rounds(
    model: Model, engines: Sequence[PeerProcess], num_streams: int, reps: int
) -> dict[str, Turns]:
    """Return the turns of each engine; a round before them warms up."""
    turns: dict[str, Turns] = {engine.name: [] for engine in engines}
    for repetition in range(reps + 1):
        rng = random.Random(f"{num_streams}/{repetition}")
        requests = [
            BenchmarkRequest(tuple(model.draw(rng, PROMPT_TOKENS)), NEW_TOKENS)
            for _ in range(num_streams)
        ]
        first = repetition % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            speed = measure_speed(torch.device("cpu"), torch.bfloat16, _STRETCH_S)
            with engine.turn():
                run = engine.run(requests)
            turns[engine.name] += [(run, speed)] if repetition else []
            print(f"{num_streams} {engine.name}: {run.wall_s:.2f} s", file=sys.stderr, flush=True)
    return turns


def prompt_s(run: PeerRun) -> float:
    """Seconds until all requests have their first token."""
    return max(run.ttft_s)


def step_s(run: PeerRun) -> float:
    """Seconds per token of the request that started last."""
    return run.tpot_s[run.ttft_s.index(max(run.ttft_s))]


def summarize(model: Model, num_streams: int, turns: dict[str, Turns]) -> dict[str, Any]:
    """Return figures by engine; ratios within a round are above 1 where ours is faster."""
    cost, num_tokens = model_cost(model.folder), PROMPT_TOKENS + NEW_TOKENS // 2
    ours = [run for run, _ in turns[OURS]]
    figures: dict[str, Any] = {}
    for name, own in turns.items():
        runs = [run for run, _ in own]
        pairs = list(zip(runs, ours, strict=True))
        firsts = [
            a == b for one, our in pairs
            for a, b in zip(one.first_token_ids, our.first_token_ids, strict=True)
        ]  # fmt: skip
        figures[name] = {
            "prompt_tokens_per_s": spread(
                [num_streams * PROMPT_TOKENS / prompt_s(run) for run in runs], 1
            ),
            "decode_tokens_per_s": spread([num_streams / step_s(run) for run in runs], 2),
            "step_ms": spread([1e3 * step_s(run) for run in runs], 2),
            "wall_s": spread([run.wall_s for run in runs]),
            "prompt_times_ours": spread([prompt_s(one) / prompt_s(our) for one, our in pairs]),
            "decode_times_ours": spread([step_s(one) / step_s(our) for one, our in pairs]),
            "first_tokens_like_ours": sum(firsts) / len(firsts),
        }
    expected = [forecast_ms(cost, speed, num_streams, num_tokens) for _, speed in turns[OURS]]
    steps = [1e3 * step_s(run) for run in ours]
    figures[OURS] |= {
        "forecast_ms": spread(expected, 2),
        "step_times_forecast": spread([a / b for a, b in zip(steps, expected, strict=True)]),
        "machine_gb_per_s": spread([speed.bytes_per_s / 1e9 for _, speed in turns[OURS]], 1),
        "machine_tflop_per_s": spread([speed.flops_per_s / 1e12 for _, speed in turns[OURS]], 3),
    }
    return figures


def measure_turns(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """Hold the same sessions with both models, turn by turn."""
    folders = {"hybrid": model.folder, "dense": model.dense}
    ttft_ms: dict[str, list[list[float]]] = {name: [[] for _ in range(TURNS)] for name in folders}
    cached: dict[str, list[int]] = {}
    lengths: list[int] = []
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                LLM(folder, max_model_len=4096, max_num_seqs=4, kv_cache_memory_bytes=2**30)
            )
            for name, folder in folders.items()
        }
        for repetition in range(arguments.reps + 1):  # the first warms up
            rng = random.Random(repetition)
            said: dict[str, list[int]] = {name: [] for name in llms}
            cached, lengths = {name: [] for name in llms}, []
            for turn in range(TURNS):
                new = model.draw(rng, SAID_TOKENS)
                for name in sorted(llms, reverse=bool((turn + repetition) % 2)):
                    said[name] += new
                    (output,) = llms[name].generate(
                        list(said[name]), params(ANSWER_TOKENS), use_tqdm=False
                    )
                    first_s = output.metrics.time_to_first_token_s
                    assert first_s is not None
                    ttft_ms[name][turn] += [1e3 * first_s] if repetition else []
                    cached[name].append(output.num_cached_tokens or 0)
                    said[name] += output.outputs[0].token_ids
                lengths.append(len(said["hybrid"]) - ANSWER_TOKENS)
    ratios = [
        [a / b for a, b in zip(*both, strict=True)] for both in zip(*ttft_ms.values(), strict=True)
    ]
    return {
        "num_prompt_tokens": lengths,
        "num_cached_tokens": cached,
        "ttft_ms": {name: [spread(one, 1) for one in own] for name, own in ttft_ms.items()},
        "hybrid_times_dense": [spread(one) for one in ratios],
    }


def measure_hits(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """Count requests that find a shared prefix. Nothing here depends on time."""
    found: dict[str, Any] = {}
    rng = random.Random(0)
    with LLM(
        model.folder,
        max_model_len=2048,
        max_num_seqs=NUM_SHARING,
        kv_cache_memory_bytes=4 * 2**30,
    ) as llm:
        for num_shared in PREFIX_TOKENS:
            for kind in ("warm", "cold"):
                shared = model.draw(rng, num_shared)
                prompts = [shared + model.draw(rng, OWN_TOKENS) for _ in range(NUM_SHARING + 1)]
                llm.reset_prefix_cache()
                first = prompts.pop()
                if kind == "warm":
                    llm.generate(first, params(1), use_tqdm=False)
                outputs = llm.generate(prompts, params(1), use_tqdm=False)
                counts = [output.num_cached_tokens or 0 for output in outputs]
                found[f"{num_shared}, {kind}"] = {
                    "num_requests": len(counts),
                    "num_hits": sum(count > 0 for count in counts),
                    "num_cached_tokens": {
                        str(count): counts.count(count) for count in sorted(set(counts))
                    },
                }
    return found


def measure_memory(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read `--check`'s table, and the engine's size after its start and with a full cache."""
    flags = {"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 2**29}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "nanocore.engine_core", "--check"]
    command += ["--model", str(model.folder), *(word.replace("_", "-") for word in words)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^  (\S[^\d]*?) +([\d,.]+) MB", printed, re.MULTILINE)
    listed = {name: float(value.replace(",", "")) for name, value in rows}
    del listed["left"], listed["grammars"]  # nobody asks for structured outputs
    rng = random.Random(0)
    with LLM(model.folder, **flags) as llm:
        pid = engine_pid(llm._client.endpoint)
        started_mb = resident_mb(pid)
        for _ in range(3):
            prompts = [model.draw(rng, 1500) for _ in range(flags["max_num_seqs"])]
            llm.generate(prompts, params(8), use_tqdm=False)
        full_mb = resident_mb(pid)
    listed_mb = sum(listed.values())
    return {
        "flags": flags,
        "listed_mb": listed,
        "sum_mb": round(listed_mb, 1),
        "started_mb": started_mb,
        "full_mb": full_mb,
        "full_of_listed": round(full_mb / listed_mb, 4),
    }


def resident_mb(pid: int | None) -> float:
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return round(int(kib) * 1024 / 1e6, 1)


def show(report: dict[str, Any]) -> None:
    """Print tables of the parts that the report has."""
    found = {part: report[part]["figures"] for part in PARTS if part in report}
    if "speed" in found:
        rows = [["streams, engine", "prompt tok/s", "decode tok/s", "prompt, times ours",
                 "decode, times ours", "step ms", "step, times forecast"]]  # fmt: skip
        for num_streams, engines in found["speed"]["streams"].items():
            for name, own in engines.items():
                keys = ("prompt_tokens_per_s", "decode_tokens_per_s", "prompt_times_ours",
                        "decode_times_ours", "step_ms", "step_times_forecast")  # fmt: skip
                cells = [with_range(own[key]) if key in own else "" for key in keys]
                rows.append([f"{num_streams}, {name}", *cells])
        print(table(rows))
    if "turns" in found:
        turns = found["turns"]
        rows = [["turn", "prompt", "cached, hybrid", "cached, dense", "hybrid, TTFT ms",
                 "dense, TTFT ms", "times"]]  # fmt: skip
        for number, ratio in enumerate(turns["hybrid_times_dense"]):
            cached = [str(turns["num_cached_tokens"][name][number]) for name in turns["ttft_ms"]]
            times = [with_range(own[number], 0) for own in turns["ttft_ms"].values()]
            prompt = str(turns["num_prompt_tokens"][number])
            rows.append([str(number + 1), prompt, *cached, *times, with_range(ratio)])
        print(table(rows))
    for name, own in found.get("hits", {}).items():
        print(f"prefix of {name}: {own['num_hits']} of {own['num_requests']}, "
              f"tokens found: {own['num_cached_tokens']}")  # fmt: skip
    if "memory" in found:
        own = found["memory"]
        print(
            f"memory: {own['full_mb']:,.0f} MB of {own['sum_mb']:,.0f} MB listed "
            f"({own['full_of_listed']:.1%}), {own['started_mb']:,.0f} MB after the start"
        )


def main() -> None:
    """Measure, print and write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `with` cleans up
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3.5-0.8b", help="a shape that has a -dense one")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    add_arguments(parser)
    arguments, arguments.engine = parser.parse_known_args()
    folder = model_folder(arguments.model)
    vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = Model(folder, model_folder(f"{arguments.model}-dense"), vocab_size)
    measures = dict(zip(
        PARTS, (measure_speed_of_engines, measure_turns, measure_hits, measure_memory), strict=True
    ))  # fmt: skip
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part in arguments.parts.split(","):
        report[part] = {
            **describe_run(("nanocore", "torch")),
            "model": arguments.model,
            "reps": arguments.reps,
        }
        try:
            report[part] |= {"figures": measures[part](model, arguments)}
        except PeerError as error:
            sys.exit(f"hybrid.py: {error}")
        write_report(arguments.out, report)
    show(report)


if __name__ == "__main__":
    main()
