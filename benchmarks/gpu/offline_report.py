"""nano-vllm's benchmark through the SDK, and without it in this process, beside its least time.

`sdk` is what users get: `nanocore.client.LLM`, an engine in a process of its own, both ends of the
wire. `in process` leaves out the wire and the client, so the difference is what these cost.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Generated, LocalEngine, common_settings
from benchmarks.gpu.engine_report import free_memory
from benchmarks.gpu.session import Results, Session
from benchmarks.gpu.shapes import Model, models, rates
from benchmarks.gpu.workload import TEMPERATURE, Workload, nano_vllm_workload
from benchmarks.machine import spread
from nanocore.client import LLM
from nanocore.protocol.sampling import SamplingParams


def measure(session: Session) -> None:
    """Through the SDK for each model, and in process for the first one."""
    results = Results(session, "offline", needs_s=20.0 if session.on_gpu else 1.0)
    results.data["rates_measured"] = rates(session).measured
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as name:
        for number, model in enumerate(models(session).values()):
            folder = model.write_folder(Path(name))
            results.measure(f"{model.name}/sdk", _run_sdk, session, model, folder)
            if number == 0:  # the smaller model, of which the host is the larger part
                results.measure(f"{model.name}/in process", _run_in_process, session, model, folder)
                free_memory()
    results.finish()


def engine_settings(session: Session) -> dict[str, Any]:
    """Of nanocore-engine."""
    return common_settings(session) | {"load_format": "dummy"}


def generate(llm: LLM, workload: Workload) -> tuple[float, list[list[int]]]:
    """Seconds from the first submission to the last token, and the tokens.

    Raises:
        RuntimeError: a request did not get its tokens.
    """
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=count, ignore_eos=True, detokenize=False, seed=i
        )
        for i, count in enumerate(workload.num_outputs)
    ]
    start_s = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    if [len(ids) for ids in tokens] != workload.num_outputs:
        raise RuntimeError(f"requests ended early: {sum(map(len, tokens))} tokens in all")
    return wall_s, tokens


def _run_sdk(session: Session, model: Model, folder: Path) -> dict[str, Any]:
    start_s = time.perf_counter()
    limit_s = max(60.0, session.remaining_s)
    with LLM(folder, start_timeout_s=limit_s, **engine_settings(session)) as llm:
        ready_s = time.perf_counter() - start_s
        _, _ = generate(llm, _warm_up(model))
        first_s = time.perf_counter() - start_s
        before = llm.stats().num_steps
        walls_s = [
            generate(llm, nano_vllm_workload(model.shape.vocab_size, repetition, session.small))[0]
            for repetition in range(_num_rounds(session))
        ]
        num_steps = (llm.stats().num_steps - before) / len(walls_s)
        num_preemptions = llm.stats().num_preemptions
    return {
        "ready_s": round(ready_s, 2),
        "first_tokens_s": round(first_s, 2),
        "num_preemptions": num_preemptions,
        **summarize(session, model, walls_s, num_steps),
    }


def _run_in_process(session: Session, model: Model, folder: Path) -> dict[str, Any]:
    engine = LocalEngine(folder, **common_settings(session), load_format="dummy")
    for prompt, count in zip(_warm_up(model).prompts, _warm_up(model).num_outputs, strict=True):
        engine.add(prompt, count, TEMPERATURE)
    engine.run()
    walls_s, num_steps = [], 0
    for repetition in range(_num_rounds(session)):
        workload = nano_vllm_workload(model.shape.vocab_size, repetition, session.small)
        before, generated = engine.scheduler.counters.num_steps, Generated()
        start_s = time.perf_counter()
        for i, (prompt, count) in enumerate(
            zip(workload.prompts, workload.num_outputs, strict=True)
        ):
            engine.add(prompt, count, TEMPERATURE, seed=i)
        while generated.num_ended < len(workload.prompts):
            engine.step(generated)
        walls_s.append(time.perf_counter() - start_s)
        num_steps = engine.scheduler.counters.num_steps - before
        engine.run()  # steps that were begun before the last one's end was known
    figures = {"phases_s": engine.phases_s, "kernels": engine.kernels,
               **summarize(session, model, walls_s, num_steps)}  # fmt: skip
    engine.close()
    return figures


def summarize(
    session: Session, model: Model, walls_s: list[float], num_steps: float
) -> dict[str, Any]:
    """Throughput of repetitions, and the share of the limit."""
    workload = nano_vllm_workload(model.shape.vocab_size, 0, session.small)
    limit_s = model.workload_s(workload.sizes, rates(session))
    throughput = spread([round(workload.num_output_tokens / wall_s, 1) for wall_s in walls_s])
    return {
        "wall_s": spread([round(wall_s, 4) for wall_s in walls_s]),
        "output_tokens_per_s": throughput,
        "limit_tokens_per_s": round(workload.num_output_tokens / limit_s, 1),
        "share_of_limit": round(throughput["median"] * limit_s / workload.num_output_tokens, 4),
        "num_steps": num_steps,
        "num_prompt_tokens": sum(map(len, workload.prompts)),
        "num_output_tokens": workload.num_output_tokens,
    }


def _warm_up(model: Model) -> Workload:
    """A few short requests: kernels are compiled, memory is touched."""
    tokens = [i % model.shape.vocab_size for i in range(40)]
    return Workload([tokens[i:] for i in range(4)], [8] * 4)


def _num_rounds(session: Session) -> int:
    return 2 if session.small else 3
