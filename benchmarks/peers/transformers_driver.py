"""transformers behind the line protocol: one static batch per workload, or continuous batching.

    path/to/python-with-transformers transformers_driver.py --model FOLDER --threads 2

Static: prompts are padded on the left to the longest, and all rows run until the longest output is
done; a request's tokens past its own number are thrown away, their time is not. Continuous: without
a flash-attn package it attends by torch, over a mask of the whole batch's KV, which is how far an
installation without extras goes; single tokens are not timed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from line_protocol import (
    Requests,
    TokenClock,
    claim_stdout,
    describe_run,
    driver_parser,
    serve,
    without_sampling,
)


class _StepClock:
    """A streamer that notes when each step's tokens came; the first call brings the prompts."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _token_ids: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    """Load the model and serve."""
    parser = driver_parser()
    parser.add_argument("--batching", choices=("static", "continuous"), default="static")
    arguments = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(arguments.threads)
    is_static = arguments.batching == "static"
    attention = "sdpa" if is_static else "paged|sdpa"
    run = _run_static if is_static else _run_continuous
    model = _load(arguments, attention)
    serve(
        answers,
        without_sampling(lambda requests: run(model, arguments, requests)),
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        settings={"dtype": arguments.dtype, "batching": arguments.batching, "attention": attention},
        may_be_stopped=arguments.device == "cpu",
    )


def _load(arguments: argparse.Namespace, attention: str) -> Any:
    if not arguments.random_weights:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype
        )
    else:
        config = transformers.AutoConfig.from_pretrained(arguments.model)
        torch.manual_seed(0)
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, arguments.dtype)
            )
    model = model.to(arguments.device).eval()
    model.set_attn_implementation(attention)
    return model


@torch.inference_mode()
def _run_static(model: Any, arguments: argparse.Namespace, requests: Requests) -> dict[str, Any]:
    length = max(len(prompt) for prompt, _ in requests)
    num_steps = max(num_output_tokens for _, num_output_tokens in requests)
    start_s = time.perf_counter()
    token_ids = torch.zeros(len(requests), length, dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, (prompt, _) in enumerate(requests):
        token_ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    steps = _StepClock()
    outputs = model.generate(
        token_ids.to(arguments.device),
        attention_mask=mask.to(arguments.device),
        generation_config=_generation(arguments, num_steps, eos_token_id=None),
        streamer=steps,
    )
    wall_s = time.perf_counter() - start_s
    clock = TokenClock(start_s, len(requests))
    generated = []
    for row, (_, num_output_tokens) in enumerate(requests):
        generated.append(outputs[row, length : length + num_output_tokens].tolist())
        clock.tick(row, steps.times_s[1])
        clock.tick(row, steps.times_s[num_output_tokens])
    return clock.describe_run(wall_s, generated)


def _run_continuous(
    model: Any, arguments: argparse.Namespace, requests: Requests
) -> dict[str, Any]:
    """The manager is started and warmed up before the clock is."""
    share = arguments.memory_share
    batching = transformers.ContinuousBatchingConfig(
        allow_block_sharing=False,
        # Of what is free, where the other engine of the pair has its share already.
        max_memory_percent=min(0.9, share / (1 - share)),
        max_batch_tokens=arguments.max_num_batched_tokens,
        num_blocks=None if arguments.device == "cuda" else 16,
        max_requests_per_batch=arguments.max_num_seqs,
    )
    generation = _generation(arguments, max(n for _, n in requests), eos_token_id=-1)
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


def _generation(
    arguments: argparse.Namespace, num_steps: int, eos_token_id: int | None
) -> transformers.GenerationConfig:
    flags: dict[str, Any] = {"do_sample": False}
    if arguments.temperature:
        temperature = arguments.temperature
        flags = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return transformers.GenerationConfig(
        max_new_tokens=num_steps, pad_token_id=0, eos_token_id=eos_token_id, **flags
    )


if __name__ == "__main__":
    main()
