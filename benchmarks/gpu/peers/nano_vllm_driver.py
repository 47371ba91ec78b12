"""nano-vllm behind the line protocol, from its source, with random weights and FlashAttention 3.

Its repository is carried; stand_ins/flash_attn takes the place of a package that has no wheel for
this torch. nano-vllm reads weights from files, which would be gigabytes of random numbers: its
loader is replaced by one that draws them on the device. It asks for a tokenizer, and gets one.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import fa3
from benchmarks.gpu.peers.arguments import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    driver_parser,
)
from benchmarks.gpu.workload import TEMPERATURE
from benchmarks.peers.line_protocol import Requests, claim_stdout, describe_run, serve


def main() -> None:
    """Start the engine and serve."""
    arguments = driver_parser().parse_args()
    answers = claim_stdout()
    os.environ[fa3.FOLDER_VARIABLE] = str(arguments.carried or "")
    write_tokenizer(arguments.model)
    engine = _start(arguments.model, arguments.memory_share)
    serve(
        answers,
        lambda requests: _run(engine, requests),
        versions={"nano-vllm": "source", "torch": torch.__version__},
        settings={"attention": arguments.attention},
        may_be_stopped=False,
    )


def _start(folder: Path, memory_share: float) -> Any:
    runner = importlib.import_module("nanovllm.engine.model_runner")
    runner.load_model = draw_weights
    return importlib.import_module("nanovllm").LLM(
        str(folder),
        enforce_eager=False,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        gpu_memory_utilization=memory_share * 2,  # it counts what the other engine has
    )


@torch.no_grad()
def draw_weights(model: Any, _folder: str) -> None:
    """In place of its loader: norms near 1, matrices that keep the size of what they are given."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def write_tokenizer(folder: Path) -> None:
    """The least that AutoTokenizer loads; no text passes through it but its own warm-up."""
    vocab = {"<unk>": 0, "<eos>": 1, "a": 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _run(engine: Any, requests: Requests) -> dict[str, Any]:
    sampling = importlib.import_module("nanovllm").SamplingParams
    params = [sampling(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for _, n in requests]
    start_s = time.perf_counter()
    outputs = engine.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    return describe_run(wall_s, [], [], [output["token_ids"] for output in outputs])


if __name__ == "__main__":
    main()
