"""nano-vllm behind the line protocol, from its source, with random weights; it needs a GPU.

Packages that it imports and the machine lacks are on the path in some form. nano-vllm reads weights
from files, which would be gigabytes of random numbers: its loader is replaced by one that draws
them on the device. It asks for a tokenizer, and gets one.
"""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from line_protocol import (
    Requests,
    claim_stdout,
    describe_run,
    driver_parser,
    serve,
    without_sampling,
)


def main() -> None:
    """Start the engine and serve."""
    arguments = driver_parser().parse_args()
    answers = claim_stdout()
    _write_tokenizer(Path(arguments.model))
    runner: Any = importlib.import_module("nanovllm.engine.model_runner")
    runner.load_model = _draw_weights
    engine = importlib.import_module("nanovllm").LLM(
        arguments.model,
        enforce_eager=False,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        # It counts what the other engine of the pair has.
        gpu_memory_utilization=arguments.memory_share * 2,
    )
    serve(
        answers,
        without_sampling(lambda requests: _run(engine, requests, arguments.temperature)),
        versions={"nano-vllm": "source", "torch": torch.__version__},
        settings={},
        may_be_stopped=False,
    )


@torch.no_grad()
def _draw_weights(model: Any, _folder: str) -> None:
    """In place of its loader: norms are 1, matrices keep the size of what they are given."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _write_tokenizer(folder: Path) -> None:
    """The least that AutoTokenizer loads; no text passes through it but its own warm-up."""
    vocab = {"<unk>": 0, "<eos>": 1, "a": 2}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"pre_tokenizer": {"type": "Whitespace"}})
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<unk>"}))


def _run(engine: Any, requests: Requests, temperature: float) -> dict[str, Any]:
    sampling = importlib.import_module("nanovllm").SamplingParams
    params = [sampling(temperature=temperature, ignore_eos=True, max_tokens=n) for _, n in requests]
    start_s = time.perf_counter()
    outputs = engine.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    return describe_run(wall_s, [], [], [output["token_ids"] for output in outputs])


if __name__ == "__main__":
    main()
