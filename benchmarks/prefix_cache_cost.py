"""What prefix caching costs where nothing is ever found: prompts that share nothing.

    nice -n -15 python benchmarks/prefix_cache_cost.py [--model small] [--pairs 5]

Two engines, with and without prefix caching, run the same workloads (W1, which decodes, and W2,
which is all prompts) in turn; pairs alternate in who goes first. The ratio of their times is noisy
on a shared machine by more than the cost. So the cost is measured alone, too: admission (hashing)
and scheduler (lookups, registering and evicting blocks) see the same requests with an executor that
answers at once, with caching and without, and the CPU time of the one less that of the other is
laid beside the time that the workload takes with the model. The pool is small, so that blocks are
evicted all the time. Writes benchmarks/results/prefix-cache-cost.json.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from frozen_heap import frozen_heap
from machine import CpuTimes, describe_run, nice_sessions, spread, write_report
from models import model_folder
from no_model_engine import NoModelExecutor
from offline import submit
from workloads import Workload, make_workload

from nanocore.client import LLM
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import KVCacheManager
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams

RESULTS: Final = Path(__file__).parent / "results" / "prefix-cache-cost.json"
WORKLOADS: Final = ("W1", "W2")
GOAL: Final = 0.01
MAX_MODEL_LEN: Final = 2048
MAX_NUM_SEQS: Final = 32
NUM_BLOCKS: Final = 1024
"""Two repetitions of W2 fill them."""
WARM_UP: Final = 2  # rounds that are not counted: they fill the pool
PASSES: Final = 30
"""Passes of a workload without a model, with caching and without in turn."""
VARIANTS: Final = {"on": True, "off": False}
_now_ns = time.thread_time_ns


class Bookkeeper:
    """Admission and scheduler of one engine, with an executor that answers at once.

    They live on from pass to pass, so that the pool is as full as in the engine.
    """

    def __init__(self, caching: bool, vocab_size: int) -> None:
        config = EngineConfig(enable_prefix_caching=caching, max_num_seqs=MAX_NUM_SEQS)
        kv_cache = KVCacheManager(NUM_BLOCKS, config.sizes.block_size, caching)
        self.scheduler = Scheduler(config.scheduler_config(MAX_MODEL_LEN), kv_cache)
        limit = QueueLimit(10**9, 10**12, self.scheduler.counters)
        card = ModelCard(
            model="none", architecture="none", dtype="none", vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN, eos_token_ids=[], block_size=config.sizes.block_size,
            num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        self._admission = Admission(card, config, limit)
        self._executor = NoModelExecutor(MAX_NUM_SEQS, list(range(1000)))
        self._num_handles = 0

    def run(self, workload: Workload) -> dict[str, int]:
        """See a workload's requests through; CPU nanoseconds of either part, and steps."""
        scheduler = self.scheduler
        submits = [_submit(request.prompt_token_ids, request.num_output_tokens)
                   for request in workload.requests]  # fmt: skip
        num_steps = scheduler.counters.num_steps
        t0 = _now_ns()
        requests = [self._admission.build(submit, self._next_handle(), 1) for submit in submits]
        admission_ns = _now_ns() - t0
        t0 = _now_ns()
        for request in requests:
            scheduler.add(request)
        scheduler_ns = _now_ns() - t0
        while scheduler.num_requests:
            t0 = _now_ns()
            plan = scheduler.schedule()
            scheduler_ns += _now_ns() - t0
            result = self._executor.execute(plan)
            t0 = _now_ns()
            scheduler.update(result)
            scheduler_ns += _now_ns() - t0
        return {
            "admission_ns": admission_ns,
            "scheduler_ns": scheduler_ns,
            "num_steps": scheduler.counters.num_steps - num_steps,
        }

    def _next_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles


def _submit(prompt: tuple[int, ...], num_output_tokens: int) -> Submit:
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    return Submit(
        request_id="a", prompt_token_ids=np.array(prompt, "<i4").tobytes(), sampling=sampling
    )


def measure_alone(name: str, vocab_size: int, num_passes: int) -> dict[str, Any]:
    """Microseconds of CPU that one repetition of a workload costs more with caching."""
    keepers = {variant: Bookkeeper(on, vocab_size) for variant, on in VARIANTS.items()}
    extra: dict[str, list[float]] = {"admission_us": [], "scheduler_us": [], "total_us": []}
    num_steps = 0
    for repetition in range(WARM_UP + num_passes):
        workload = make_workload(name, vocab_size, repetition)
        order = list(VARIANTS) if repetition % 2 else list(VARIANTS)[::-1]
        with frozen_heap():
            costs = {variant: keepers[variant].run(workload) for variant in order}
        if repetition < WARM_UP:
            continue
        on, off = costs["on"], costs["off"]
        num_steps = on["num_steps"]
        assert num_steps == off["num_steps"], "both plan the same steps"
        more = [(on[part] - off[part]) / 1e3 for part in ("admission_ns", "scheduler_ns")]
        for part, value in zip(extra, (*more, sum(more)), strict=True):
            extra[part].append(round(value, 1))
    assert keepers["on"].scheduler.kv_cache.stats.hits == 0
    assert keepers["on"].scheduler.kv_cache.num_cached_blocks > 0
    return {"num_steps": num_steps, **{part: spread(values) for part, values in extra.items()}}


def run_once(llm: LLM, workload: Workload) -> float:
    """Seconds that the engine takes for a workload that finds nothing cached."""
    wall_s, outputs = submit(llm, workload.requests)
    if any(output.num_cached_tokens for output in outputs):
        raise RuntimeError(f"{workload.name}: a prompt was found in the cache; it must not be")
    return wall_s


def measure_pairs(engines: dict[str, LLM], name: str, num_pairs: int) -> dict[str, Any]:
    """Seconds of either engine, and how many times longer the one with caching takes."""
    vocab_size = engines["on"].model_card.vocab_size
    names = ("on_s", "off_s", "on_to_off", "foreign_cpu_share")
    figures: dict[str, list[float]] = {figure: [] for figure in names}
    for repetition in range(WARM_UP + num_pairs):
        workload = make_workload(name, vocab_size, repetition)
        order = list(VARIANTS) if repetition % 2 else list(VARIANTS)[::-1]
        cpu_times = CpuTimes.now()
        wall_s = {variant: run_once(engines[variant], workload) for variant in order}
        if repetition < WARM_UP:
            continue
        ratio = wall_s["on"] / wall_s["off"]
        share = CpuTimes.now().foreign_share_since(cpu_times)
        values = (wall_s["on"], wall_s["off"], ratio, share)
        for figure, value in zip(figures, values, strict=True):
            figures[figure].append(round(value, 4))
    return {figure: spread(values) for figure, values in figures.items()}


def measure(model: Path, num_pairs: int, num_passes: int) -> dict[str, dict[str, Any]]:
    """Of each workload the pairs, the cost alone, and its share of the time with the model."""
    summary: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        engines = {
            variant: stack.enter_context(
                LLM(model, enable_prefix_caching=on, max_num_seqs=MAX_NUM_SEQS,
                    max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=NUM_BLOCKS)
            )
            for variant, on in VARIANTS.items()
        }  # fmt: skip
        vocab_size = engines["on"].model_card.vocab_size
        with nice_sessions():
            for name in WORKLOADS:
                pairs = measure_pairs(engines, name, num_pairs)
                alone = measure_alone(name, vocab_size, num_passes)
                off_us = pairs["off_s"]["median"] * 1e6
                summary[name] = {
                    "description": make_workload(name, vocab_size, 0).description,
                    "engine": pairs,
                    "alone": alone,
                    "step_ms": round(off_us / alone["num_steps"] / 1e3, 4),
                    "goal_step_ms": round(
                        alone["total_us"]["median"] / alone["num_steps"] / 1e3 / GOAL, 4
                    ),
                    "share": round(alone["total_us"]["median"] / off_us, 6),
                }
    return summary


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line for each workload."""
    lines = [
        "| | a step, ms | caching costs a step, us (hashing + the rest) | share "
        f"| it would be {GOAL:.0%} of a step of, ms | with to without |",
        "|---" * 6 + "|",
    ]
    for name, row in summary.items():
        alone, ratio = row["alone"], row["engine"]["on_to_off"]
        total, admission, scheduler = (
            alone[part]["median"] / alone["num_steps"]
            for part in ("total_us", "admission_us", "scheduler_us")
        )
        lines.append(
            f"| {name}, {row['description']} | {row['step_ms']:.1f} "
            f"| {total:.1f} ({admission:.1f} + {scheduler:.1f}) | {row['share']:.3%} "
            f"| {row['goal_step_ms']:.2f} "
            f"| {ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    head = {**describe_run(), "model": Path(arguments.model).name, "goal": GOAL}
    summary = measure(model_folder(arguments.model), arguments.pairs, arguments.passes)
    print(table(summary))
    worst = max(row["share"] for row in summary.values())
    print(f"goal: below {GOAL:.0%} of a step, {'met' if worst < GOAL else 'missed'}: {worst:.3%}")
    write_report(arguments.out, {**head, "workloads": summary})


if __name__ == "__main__":
    main()
