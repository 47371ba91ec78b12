"""vLLM behind the line protocol: its V1 engine with a process of its own, and dummy weights."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from benchmarks.gpu.peers.arguments import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    driver_parser,
)
from benchmarks.gpu.workload import TEMPERATURE
from benchmarks.peers.line_protocol import Requests, claim_stdout, describe_run, serve

_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def main() -> None:
    """Start the engine and serve."""
    arguments = driver_parser().parse_args()
    answers = claim_stdout()
    os.environ.update(_ENVIRONMENT)
    import vllm

    start_s = time.perf_counter()
    engine = vllm.LLM(
        model=str(arguments.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        gpu_memory_utilization=arguments.memory_share,
        enable_prefix_caching=False,
        disable_log_stats=True,
        attention_backend=arguments.attention,
    )
    serve(
        answers,
        lambda requests: _run(engine, requests),
        versions={"vllm": vllm.__version__},
        settings={"attention": arguments.attention,
                  "start_s": round(time.perf_counter() - start_s, 1)},
        may_be_stopped=False,
    )  # fmt: skip


def _run(engine: Any, requests: Requests) -> dict[str, Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False)
        for _, n in requests
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    start_s = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    return describe_run(wall_s, [], [], [list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    main()
