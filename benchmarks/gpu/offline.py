"""nano-vllm's benchmark through the SDK, beside its least time: what users get.

`nanocore.client.LLM`, an engine in a process of its own, both ends of the wire.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import common_settings
from benchmarks.gpu.session import Session
from benchmarks.gpu.shapes import Model, rates
from benchmarks.gpu.workload import TEMPERATURE, Workload, nano_vllm_workload
from benchmarks.machine import spread
from nanocore.client import LLM
from nanocore.protocol.sampling import SamplingParams


def offline_figures(session: Session, model: Model, parent: Path) -> dict[str, Any]:
    """Output tokens per second of some repetitions, and the share of the limit."""
    start_s = time.perf_counter()
    limit_s = max(60.0, session.remaining_s)
    settings = common_settings(session)
    with LLM(model.write_folder(parent), start_timeout_s=limit_s, **settings) as llm:
        ready_s = time.perf_counter() - start_s
        tokens = [i % model.shape.vocab_size for i in range(40)]
        generate(llm, Workload([tokens[i:] for i in range(4)], [8] * 4))  # compiles, touches memory
        first_s = time.perf_counter() - start_s
        before = llm.stats().num_steps
        walls_s = [
            generate(llm, nano_vllm_workload(model.shape.vocab_size, repetition, session.small))[0]
            for repetition in range(2)
        ]
        num_steps = (llm.stats().num_steps - before) / len(walls_s)
        num_preemptions = llm.stats().num_preemptions
    workload = nano_vllm_workload(model.shape.vocab_size, 0, session.small)
    least_s, num_tokens = (
        model.workload_s(workload.sizes, rates(session)),
        workload.num_output_tokens,
    )
    throughput = spread([round(num_tokens / wall_s, 1) for wall_s in walls_s])
    return {
        "ready_s": round(ready_s, 2),
        "first_tokens_s": round(first_s, 2),
        "wall_s": spread([round(wall_s, 4) for wall_s in walls_s]),
        "output_tokens_per_s": throughput,
        "limit_tokens_per_s": round(num_tokens / least_s, 1),
        "share_of_limit": round(throughput["median"] * least_s / num_tokens, 4),
        "num_steps": num_steps,
        "num_preemptions": num_preemptions,
        "num_output_tokens": num_tokens,
    }


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
