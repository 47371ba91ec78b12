"""transformers' `generate` behind compare.py's line protocol: one static batch per workload.

    path/to/python-with-transformers transformers_driver.py --model FOLDER --threads 2

Prompts are padded on the left to the longest, and all rows run until the longest output is done;
a request's tokens past its own number are thrown away, their time is not.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from line_protocol import Requests, TokenClock, claim_stdout, serve


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=arguments.dtype, attn_implementation="sdpa"
    ).eval()
    serve(
        answers,
        lambda requests: _run(model, requests),
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        settings={"dtype": arguments.dtype, "batching": "static, padded on the left"},
    )


@torch.inference_mode()
def _run(model: Any, requests: Requests) -> dict[str, Any]:
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
        token_ids,
        attention_mask=mask,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=num_steps, do_sample=False, pad_token_id=0, eos_token_id=None
        ),
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


if __name__ == "__main__":
    main()
