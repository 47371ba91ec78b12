"""transformers' continuous batching behind the line protocol, with random weights.

Without a flash-attn package it attends by torch, over a mask of the whole batch's KV. That is how
far an installation without extras goes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks.gpu.peers.arguments import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    driver_parser,
)
from benchmarks.gpu.workload import TEMPERATURE
from benchmarks.peers.line_protocol import Requests, claim_stdout, describe_run, serve


def main() -> None:
    """Make the model and serve."""
    arguments = driver_parser().parse_args()
    answers = claim_stdout()
    config = transformers.AutoConfig.from_pretrained(arguments.model)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().set_attn_implementation(arguments.attention)
    batching = transformers.ContinuousBatchingConfig(
        allow_block_sharing=False,
        # Of what is free, where the other engine of the pair has its share already.
        max_memory_percent=min(0.9, arguments.memory_share / (1 - arguments.memory_share)),
        max_batch_tokens=256 if arguments.small else MAX_NUM_BATCHED_TOKENS,
        num_blocks=16 if arguments.small else None,
        max_requests_per_batch=8 if arguments.small else MAX_NUM_SEQS,
    )
    serve(
        answers,
        lambda requests: _run(model, batching, requests),
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        settings={"attention": arguments.attention},
        may_be_stopped=False,
    )


def _run(model: Any, batching: Any, requests: Requests) -> dict[str, Any]:
    """The manager is started and warmed up before the clock is."""
    generation = transformers.GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1,
        pad_token_id=0, max_new_tokens=max(n for _, n in requests),
    )  # fmt: skip
    tokens: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        start_s = time.perf_counter()
        for i, (prompt, count) in enumerate(requests):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=count)
        for result in manager:
            if result.is_finished():
                tokens[result.request_id] = list(result.generated_tokens)
            if len(tokens) == len(requests):
                break
        wall_s = time.perf_counter() - start_s
    return describe_run(wall_s, [], [], [tokens.get(str(i), []) for i in range(len(requests))])


if __name__ == "__main__":
    main()
