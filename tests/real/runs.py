"""What an engine process says of fixed prompts, and how well it predicts a fixed text.

The perplexity is llama-perplexity's: the text's tokens in chunks of 512, of which the first is
replaced by BOS if the model has texts begin with it, and the mean over the last 255 of each chunk.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

from nanocore.client import LLM, SamplingParams
from nanocore.client.tokenizer import Tokenizer
from tests.real.lines import TEXT
from tests.real.reference import Continuation

CHUNK: Final = 512
NUM_CHUNKS: Final = 6
_FIRST: Final = CHUNK // 2
_PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Frankreich heißt",
    '{"name": "Ada", "born":',
    TEXT[:2400],  # longer than Gemma's window of 512 tokens
)
_GREEDY: Final = SamplingParams(
    temperature=0, max_tokens=40, ignore_eos=True, logprobs=5, detokenize=False
)


WAYS: Final[dict[str, dict[str, Any]]] = {
    "float32": {"dtype": "float32", "activation_quantization": "none"},
    "bfloat16": {"activation_quantization": "none"},
    "as it is": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Engine flags. quantization is of the dequantized weights: a file's own are served as they are."""


class Run(NamedTuple):
    """said: prompts and greedy tokens. candidates: log probabilities by token id, for each of them.

    perplexity: of the text.
    """

    said: list[Continuation]
    candidates: list[list[dict[int, float]]]
    perplexity: float


def run(path: Path, dequantized: Path, tokenizer: Tokenizer, way: str) -> Run:
    """Start an engine process of its own and ask it over its socket."""
    flags: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**28, **WAYS[way]}
    if "quantization" in flags:
        path, flags["dtype"] = dequantized, "bfloat16"
    prompts = [list(tokenizer.encode(prompt)) for prompt in _PROMPTS]
    with LLM(path, disable_log_stats=True, **flags) as llm:
        samples = [output.outputs[0] for output in llm.generate(prompts, _GREEDY, use_tqdm=False)]
        scores = llm.score(_chunks(tokenizer), use_tqdm=False)
    said = [(prompt, list(s.token_ids)) for prompt, s in zip(prompts, samples, strict=True)]
    candidates = [[{t: c.logprob for t, c in d.items()} for d in s.logprobs or ()] for s in samples]
    mean = sum(s.logprob for s in scores) / sum(s.num_tokens for s in scores)
    return Run(said, candidates, math.exp(-mean))


def _chunks(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Contexts of 257 tokens and the 255 that follow; llama.cpp drops a file's last line feed."""
    token_ids = list(tokenizer.encode(TEXT.removesuffix("\n")))
    num_before, _ = tokenizer.num_added_tokens
    chunks = []
    for start in range(0, NUM_CHUNKS * CHUNK, CHUNK):
        chunk = token_ids[:num_before] + token_ids[start + num_before : start + CHUNK]
        chunks.append((chunk[: _FIRST + 1], chunk[_FIRST + 1 :]))
    return chunks
