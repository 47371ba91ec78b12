"""Whether the engine is right: against transformers, and its own paths against each other.

The model is small, of Qwen3's architecture with head dimension 128, and has random weights under
which greedy text depends on the whole context. float32 is compared token by token. In bfloat16 two
right programs part where two tokens are nearly as likely: at the first difference the reference,
given our text, must hold our token for nearly as good as its own. Our own paths must agree exactly.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.engine import LocalEngine, engine_settings
from benchmarks.gpu.results import Measurements, Results
from benchmarks.models import SHAPES, make_model

_SHAPE: Final = replace(
    SHAPES["small"],
    head_dim=128,
    num_hidden_layers=4,
    vocab_size=4096,
    max_position_embeddings=4096,
)
_LENGTHS: Final = (1, 2, 15, 16, 17, 33, 64, 65, 127, 128, 129, 255, 257, 500, 1023, 1025, 2049)
_PATHS: Final[dict[str, dict[str, Any]]] = {
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "overlapped": {"enforce_eager": False, "async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 48},
    "one by one": {"max_num_seqs": 1},
}
MAX_MARGIN: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Of logits with a standard deviation of about 3, between two choices that bfloat16 may swap."""


def measure(results: Results, _part: str) -> None:
    """All of them."""
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as folder:
        checked = Checked(results, Path(folder) / "model")
        results.run(measurements(checked), needs_s=10, hangs_s=120)


def measurements(checked: Checked) -> Measurements:
    """By name."""
    found: Measurements = {
        f"check/transformers/{dtype}": partial(checked.with_transformers, dtype)
        for dtype in MAX_MARGIN
    }
    return found | {
        f"check/paths/{path}": partial(checked.with_eager, settings)
        for path, settings in _PATHS.items()
    }


class Checked:
    """A model, prompts of all kinds of lengths, and engines that run them."""

    def __init__(self, results: Results, folder: Path) -> None:
        session = self._session = results.session
        shape = SHAPES["tiny"] if session.small else _SHAPE
        make_model(shape, folder)
        rng = random.Random(7)
        lengths = _LENGTHS[:7] if session.small else _LENGTHS
        self._prompts = [rng.choices(range(shape.vocab_size), k=length) for length in lengths]
        self._num_outputs = 8 if session.small else 32
        self._settings = engine_settings(results) | {
            "max_num_seqs": 32, "max_num_batched_tokens": 64 if session.small else 1024,
            "kv_cache_memory_bytes": 2**26 if session.small else 2**31,
        }  # fmt: skip
        self._folder = folder
        self._eager: list[list[int]] = []

    def with_transformers(self, dtype: str) -> dict[str, Any]:
        """Ours beside the reference's; it sees our tokens at once: one pass says all choices.

        Raises:
            AssertionError: they are not those of the same model.
        """
        from transformers import AutoModelForCausalLM

        engine = LocalEngine(self._folder, **self._settings | {"dtype": dtype})
        handles = [engine.add(prompt, self._num_outputs) for prompt in self._prompts]
        engine.run()
        ours = [engine.tokens[handle] for handle in handles]
        engine.close()
        torch.backends.cuda.matmul.allow_tf32 = False
        model = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        model = model.to(self._session.device).eval()
        margins = [_margin(model, *pair) for pair in zip(self._prompts, ours, strict=True)]
        figures = {"num_requests": len(ours), "num_equal": margins.count(0.0),
                   "largest_margin": max(margins), "kernels": engine.kernels}  # fmt: skip
        if not max(margins) <= MAX_MARGIN[dtype]:
            raise AssertionError(f"the tokens are not this model's: {figures}")
        return figures

    def with_eager(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A path beside kernels that are called one by one, in one batch.

        Raises:
            AssertionError: they differ.
        """
        if not self._eager:
            self._eager = self._generate({"enforce_eager": True, "async_scheduling": False})
        tokens = self._generate(settings)
        num_equal = sum(a == b for a, b in zip(tokens, self._eager, strict=True))
        if num_equal < len(tokens):
            raise AssertionError(f"{num_equal} of {len(tokens)} requests agree")
        return {"num_equal": num_equal, "num_requests": len(tokens)}

    def _generate(self, settings: dict[str, Any]) -> list[list[int]]:
        settings = self._settings | {"batch_invariant": True} | settings
        engine = LocalEngine(self._folder, **settings)
        tokens = engine.generate(self._prompts, self._num_outputs)
        engine.close()
        return tokens


@torch.inference_mode()
def _margin(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """By how much the model prefers another token, where it first would choose one."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 :].float()
    chosen = torch.tensor(tokens, device=model.device)
    margins = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    wrong = margins.nonzero()[:, 0].tolist()
    return float(margins[wrong[0]]) if wrong else 0.0
