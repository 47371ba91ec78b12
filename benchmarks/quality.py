"""What quantization costs in quality, on a real checkpoint: divergence from float32, and top-1.

    python benchmarks/quality.py model.gguf [--llama-cpp path/to/bin] [--moved]

The checkpoint's weights become bfloat16, as models are published, and are quantized anew: by our
engine as it loads them, and by llama.cpp. All read the same chunks of this repository's documents;
each prediction of a chunk's second half is compared with that of our engine in float32. `bits` are
those of a weight, matrices alone. Writes results/quality-*.json, and with --docs the tables of
docs/models.md. --moved: see quality_models.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from model_logprobs import (
    begun,
    divergence,
    engine_logprobs,
    read_peer_logprobs,
    tokenized,
    top1_agreement,
)
from peer_process import PeerError
from quality_models import QualityModels, bits_per_weight, num_weights
from report import describe_run, positive, table, write_report
from torch import Tensor

_ROOT: Final = Path(__file__).resolve().parent.parent
_RESULTS: Final = Path(__file__).parent / "results"
_CACHE: Final = Path.home() / ".cache" / "nanocore" / "quality"
_TEXTS: Final = ("README.md", "ARCHITECTURE.md", "PROTOCOL.md")
_TEXT_CHARS: Final = 16_000  # of each
OURS: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int8, activations kept": {"quantization": "int8", "activation_quantization": "none"},
    "int4": {"quantization": "int4"},
    "int4, activations kept": {"quantization": "int4", "activation_quantization": "none"},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
}
"""Parameters of our engine by a row's name."""
PEERS: Final = ("bf16", "q8_0", "q4_0", "q4_k_m")
_START, _END = "<!-- quality: {} -->", "<!-- /quality -->"


def main() -> None:
    """Parse the command line, measure, report."""
    arguments = _parser().parse_args()
    tools = arguments.llama_cpp
    quantizer = None if tools is None else tools / "llama-quantize"
    models = QualityModels(
        arguments.checkpoint, arguments.cache, moved=arguments.moved, quantizer=quantizer
    )
    name = f"{arguments.checkpoint.stem.lower()}{'-moved' if arguments.moved else ''}"
    report: dict[str, Any] = {**describe_run(), "moved": arguments.moved}
    report |= {"chunks": arguments.chunks, "chunk_tokens": arguments.chunk_tokens}
    try:
        report["models"] = measure(models, tools, arguments)
    except (PeerError, ValueError) as error:
        sys.exit(f"quality.py: {error}")
    print(markdown(report))
    write_report(arguments.out or _RESULTS / f"quality-{name}.json", report)
    if arguments.docs:
        write_table(_ROOT / "docs" / "models.md", name, markdown(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="a GGUF file")
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama-quantize, llama-perplexity")
    parser.add_argument("--moved", action="store_true", help="move weights off their levels")
    parser.add_argument("--only", nargs="*", help="rows of ours")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="llama.cpp's types")
    parser.add_argument("--chunks", type=positive, default=8)
    parser.add_argument("--chunk-tokens", type=positive, default=512)
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of the models it makes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/models.md")
    return parser


def text() -> str:
    """Text of this repository that models are to predict."""
    return "\n".join((_ROOT / name).read_text()[:_TEXT_CHARS] for name in _TEXTS)


def measure(
    models: QualityModels, tools: Path | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Figures by the model's name.

    Raises:
        PeerError: llama.cpp failed. ValueError: the text is too short.
    """
    floats = models.floats
    chunks_NC = tokenized(floats, text(), arguments.chunks, arguments.chunk_tokens)
    begun_NC = begun(floats, chunks_NC)
    reference = engine_logprobs(floats, begun_NC, dtype="float32")[0]
    said: dict[str, Any] = {}

    def add(name: str, logprobs: Tensor, bits: float) -> None:
        said[name] = {
            "bits": round(bits, 3),
            "kl": divergence(reference, logprobs),
            "top1": top1_agreement(reference, logprobs),
        }
        print(f"{name}: {said[name]}", flush=True)

    for name, parameters in OURS.items():
        if arguments.only is None or name in arguments.only:
            logprobs, num_bytes = engine_logprobs(floats, begun_NC, dtype="bfloat16", **parameters)
            add(name, logprobs, 8 * num_bytes / num_weights(floats))
    if not arguments.moved:
        bits = bits_per_weight(models.checkpoint)
        add("file", engine_logprobs(models.checkpoint, begun_NC, dtype="bfloat16")[0], bits)
    if tools is not None:
        for kind in arguments.peers:
            path = floats if kind == "bf16" else models.quantized(kind)
            logprobs = peer_logprobs(tools / "llama-perplexity", path, chunks_NC)
            add(f"llama.cpp {kind}", logprobs, bits_per_weight(path))
    return said


def peer_logprobs(tool: Path, model: Path, chunks_NC: Tensor) -> Tensor:
    """float32 [N, S, V] of llama.cpp.

    Raises:
        PeerError: its tool failed. ValueError: it has other tokens.
    """
    num_chunks, chunk_tokens = chunks_NC.shape
    with tempfile.TemporaryDirectory() as folder:
        prompt, out = Path(folder, "text.txt"), Path(folder, "logits")
        prompt.write_text(text())
        command = [str(tool), "-m", str(model), "-f", str(prompt), "--chunks", str(num_chunks),
                   "-c", str(chunk_tokens), "--save-all-logits", str(out)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{model.name}: {(done.stdout + done.stderr)[-2000:]}")
        return read_peer_logprobs(out, chunks_NC)


def markdown(report: dict[str, Any]) -> str:
    """A row for each model."""
    rows = [["weights", "bits per weight", "KL to float32", "same top-1"]]
    for name, figures in report["models"].items():
        rows.append([name, f"{figures['bits']:.2f}", f"{figures['kl']:.4f}",
                     f"{figures['top1']:.1%}"])  # fmt: skip
    return table(rows)


def write_table(document: Path, name: str, lines: str) -> None:
    """Replace the table between a document's markers of this name.

    Raises:
        ValueError: it has none.
    """
    start = _START.format(name)
    before, found, after = document.read_text().partition(start)
    end = after.find(_END)
    if not found or end < 0:
        raise ValueError(f"{document.name} has no lines {start} and {_END}")
    document.write_text(f"{before}{start}\n{lines}\n{after[end:]}")


if __name__ == "__main__":
    main()
