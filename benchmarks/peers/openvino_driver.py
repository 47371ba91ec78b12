"""OpenVINO GenAI behind the line protocol: its pipeline with continuous batching, on a CPU.

    path/to/python-with-openvino openvino_driver.py --model FOLDER --threads 2 [--bits 4]

The model is exported to a temporary folder at start, by optimum-intel in a process of its own: in
the checkpoint's dtype, or with `--bits` of weights (4: symmetric, in groups of 32). A tokenizer of
placeholders is written beside it, for the pipeline wants one; requests bring token ids. The KV
cache and the activations that it quantizes are as OpenVINO chooses on a CPU.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from line_protocol import (
    Requests,
    TokenClock,
    claim_stdout,
    driver_parser,
    serve,
    without_sampling,
)

_EXPORT = "--export-to"


def main() -> None:
    """Export the model and serve; or, started by ourselves, only export it."""
    parser = driver_parser()
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of weights")
    parser.add_argument(_EXPORT, help="export to this folder, and end")
    arguments = parser.parse_args()
    if arguments.export_to:
        _export(arguments.model, arguments.export_to, arguments.bits)
        return
    answers = claim_stdout()
    with tempfile.TemporaryDirectory(prefix="nanocore-openvino-") as folder:
        subprocess.run([sys.executable, *sys.argv, _EXPORT, folder], check=True)
        genai: Any = importlib.import_module("openvino_genai")
        pipeline, settings = _pipeline(genai, folder, arguments)
        serve(
            answers,
            without_sampling(lambda requests: _run(genai, pipeline, requests)),
            versions={"openvino-genai": genai.__version__},
            settings={"bits": arguments.bits or 16, **settings},
        )


def _pipeline(genai: Any, folder: str, arguments: Any) -> tuple[Any, dict[str, Any]]:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = arguments.kv_cache_gib
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    settings = {"INFERENCE_NUM_THREADS": arguments.threads, "PERFORMANCE_HINT": "LATENCY"}
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings), settings


def _run(genai: Any, pipeline: Any, requests: Requests) -> dict[str, Any]:
    """Add all requests, then step until they are done."""
    openvino: Any = importlib.import_module("openvino")
    numpy: Any = importlib.import_module("numpy")
    token_ids: list[list[int]] = [[] for _ in requests]
    start_s = time.perf_counter()
    clock = TokenClock(start_s, len(requests))
    handles = []
    for index, (prompt, num_output_tokens) in enumerate(requests):
        config = genai.GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        config.max_new_tokens = config.min_new_tokens = num_output_tokens
        prompt_ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        handles.append(pipeline.add_request(index, prompt_ids, config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.perf_counter()
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    token_ids[index] += output.generated_ids
                clock.tick(index, now_s)
    return clock.describe_run(time.perf_counter() - start_s, token_ids)


def _export(model: str, out: str, bits: int | None) -> None:
    optimum: Any = importlib.import_module("optimum.intel")
    options: dict[str, Any] = {"load_in_8bit": False}
    if bits is not None:
        group_size = 32 if bits == 4 else -1
        options = {
            "quantization_config": optimum.OVWeightQuantizationConfig(
                bits=bits, group_size=group_size, sym=True, ratio=1.0
            )
        }
    exported = optimum.OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, **options
    )
    exported.save_pretrained(out)
    _write_tokenizer(Path(out), json.loads(Path(model, "config.json").read_text())["vocab_size"])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The bytes, and placeholders up to the vocabulary's size."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    openvino: Any = importlib.import_module("openvino")
    convert: Any = importlib.import_module("openvino_tokenizers").convert_tokenizer
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{i}>" for i in range(len(alphabet), vocab_size))]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    last = names[-1]
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=last, pad_token=last
    )
    encoder, decoder = convert(wrapped, with_detokenizer=True)
    openvino.save_model(encoder, str(folder / "openvino_tokenizer.xml"))
    openvino.save_model(decoder, str(folder / "openvino_detokenizer.xml"))


if __name__ == "__main__":
    main()
