"""Whether the engine is right: against transformers, and its own paths against each other.

The model is small, of Qwen3's architecture with head dimension 128, and has random weights under
which greedy text depends on the whole context. float32 is compared token by token. In bfloat16 two
right programs part where two tokens are nearly as likely: at the first difference the reference,
given our text, must hold our token for nearly as good as its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu import fa3
from benchmarks.gpu.engine import LocalEngine, graph_settings
from benchmarks.gpu.session import LackingError, Session, UnavailableError
from benchmarks.gpu.shapes import TINY_MODELS
from benchmarks.models import ModelShape, make_model

_SHAPE: Final = ModelShape(
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=1024,
    vocab_size=4096,
    max_position_embeddings=4096,
)
_SMALL_SHAPE: Final = TINY_MODELS["tiny"].shape
_LENGTHS: Final = (
    1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 500, 777, 1023, 1024, 1500,
    2049,
)  # fmt: skip
_SMALL_LENGTHS: Final = (1, 2, 15, 16, 17, 33, 64)
_PATHS: Final[dict[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "overlapped": {"enforce_eager": False, "async_scheduling": True},
    "overlapped, eager": {"enforce_eager": True, "async_scheduling": True},
}
FLASH_ATTN_3: Final = Path(__file__).parent / "stand_ins" / "flash_attn_3"
MAX_MARGIN: Final = 0.25
"""Of logits with a standard deviation of about 3, between two choices that bfloat16 may swap."""


def checks(session: Session, parent: Path) -> dict[str, Callable[[], Any]]:
    """Against transformers, and the same prompts by every path; all must agree with the first."""
    transformers = "check/transformers"
    found: dict[str, Callable[[], Any]] = {
        f"{transformers}/{dtype}": partial(_compare, session, parent, dtype)
        for dtype in ("float32", "bfloat16")
    }
    first: dict[float, list[list[int]]] = {}
    for temperature in (0.0, 1.0):
        for path, settings in _PATHS.items():
            name = f"check/paths/{path}/temperature {temperature}"
            found[name] = partial(_same_as_first, session, parent, settings, temperature, first)
    for invariant in (True, False):
        name = f"check/paths/alone and in a crowd/batch_invariant {invariant}"
        found[name] = partial(_alone, session, parent, invariant)
    found[f"{transformers}/bfloat16, flash"] = partial(_compare_flash, session, parent)
    return found


def _compare_flash(session: Session, parent: Path) -> dict[str, Any]:
    if not session.on_gpu:
        raise UnavailableError("FlashAttention 3 needs a GPU")
    if not fa3.is_carried(session.carried):
        raise LackingError("not carried: FlashAttention 3")
    os.environ[fa3.FOLDER_VARIABLE] = str(session.carried)
    sys.path.insert(0, str(FLASH_ATTN_3))
    return _compare(session, parent, "bfloat16", "flash")


def _model(session: Session, parent: Path) -> Path:
    folder = parent / "checked"
    if not folder.exists():
        make_model(_SMALL_SHAPE if session.small else _SHAPE, folder)
    return folder


def _prompts(session: Session) -> list[list[int]]:
    rng = random.Random(7)
    shape, lengths = (_SMALL_SHAPE, _SMALL_LENGTHS) if session.small else (_SHAPE, _LENGTHS)
    return [rng.choices(range(shape.vocab_size), k=length) for length in lengths]


def _num_outputs(session: Session) -> int:
    return 8 if session.small else 32


def _engine(session: Session, parent: Path, **settings: Any) -> LocalEngine:
    sizes = {"max_model_len": 512 if session.small else 4096, "max_num_seqs": 32,
             "max_num_batched_tokens": 64 if session.small else 1024,
             "kv_cache_memory_bytes": 2**26 if session.small else 2**31}  # fmt: skip
    common = {"device": session.device.type, **graph_settings(session), **sizes}
    return LocalEngine(_model(session, parent), **(common | settings))


def _compare(session: Session, parent: Path, dtype: str, backend: str = "auto") -> dict[str, Any]:
    """Ours beside the reference's.

    Raises:
        AssertionError: they are not those of the same model.
    """
    engine = _engine(session, parent, dtype=dtype, attention_backend=backend)
    ours = engine.generate(_prompts(session), _num_outputs(session))
    engine.close()
    del engine
    reference = _Reference(session, _model(session, parent), dtype)
    differences = []
    for prompt, tokens in zip(_prompts(session), ours, strict=True):
        difference = reference.first_difference(prompt, tokens)
        if difference is not None:
            differences.append({"prompt_tokens": len(prompt), **difference})
    figures = {"num_requests": len(ours), "num_tokens": sum(map(len, ours)),
               "num_equal": len(ours) - len(differences), "differences": differences}  # fmt: skip
    largest = max((d["margin"] for d in differences), default=0.0)
    if largest > (1e-3 if dtype == "float32" else MAX_MARGIN):
        raise AssertionError(f"the tokens are not this model's: {figures}")
    return {**figures, "largest_margin": largest}


class _Reference:
    """transformers' model. It sees prompt and our tokens at once: one pass says all choices."""

    def __init__(self, session: Session, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        self._device = session.device
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = self._model.to(session.device).eval()

    @torch.inference_mode()
    def first_difference(self, prompt: list[int], tokens: list[int]) -> dict[str, Any] | None:
        """Where the reference would choose another token, and by how much it prefers it."""
        ids = torch.tensor([prompt + tokens[:-1]], device=self._device)
        logits = self._model(ids).logits[0, len(prompt) - 1 :].float()
        chosen = torch.tensor(tokens, device=self._device)
        margins = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
        wrong = margins.nonzero()[:, 0].tolist()
        return {"index": wrong[0], "margin": float(margins[wrong[0]])} if wrong else None


def _same_as_first(
    session: Session,
    parent: Path,
    settings: dict[str, Any],
    temperature: float,
    first: dict[float, list[list[int]]],
) -> dict[str, Any]:
    """Compare with kernels called one by one; these also with themselves.

    Raises:
        AssertionError: they differ.
    """
    if temperature not in first:  # another process may have measured it
        first[temperature] = _tokens(session, parent, _PATHS["eager"], temperature)
    expected = first[temperature]
    tokens = _tokens(session, parent, settings, temperature)
    num_equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
    if num_equal < len(expected):
        raise AssertionError(f"{num_equal} of {len(expected)} requests agree with the first path")
    return {"num_equal": num_equal, "num_requests": len(expected)}


def _tokens(
    session: Session, parent: Path, settings: dict[str, Any], temperature: float
) -> list[list[int]]:
    engine = _engine(session, parent, batch_invariant=True, **settings)
    tokens = engine.generate(_prompts(session), _num_outputs(session), temperature)
    engine.close()
    return tokens


def _alone(session: Session, parent: Path, batch_invariant: bool) -> dict[str, Any]:
    """Requests one by one, in one batch, and in small chunks.

    Raises:
        AssertionError: they differ although the engine is to be batch-invariant.
    """
    flag = {"batch_invariant": batch_invariant}
    prompts, num_outputs = _prompts(session), _num_outputs(session)
    engine = _engine(session, parent, enable_prefix_caching=False, **flag)
    alone = []
    for number, prompt in enumerate(prompts):
        handle = engine.add(prompt, num_outputs, 1.0, number)
        alone.append(engine.run().tokens[handle])
    crowd = engine.generate(prompts, num_outputs, 1.0)
    engine.close()
    del engine
    chunked_engine = _engine(session, parent, max_num_batched_tokens=48, **flag)
    chunked = chunked_engine.generate(prompts, num_outputs, 1.0)
    chunked_engine.close()
    figures: dict[str, Any] = {
        name: sum(a == b for a, b in zip(alone, other, strict=True))
        for name, other in (("equal_in_a_crowd", crowd), ("equal_in_chunks", chunked))
    }
    figures["num_requests"] = len(prompts)
    num_equal = min(figures["equal_in_a_crowd"], figures["equal_in_chunks"])
    if batch_invariant and num_equal < len(prompts):
        raise AssertionError(f"results depend on the batch: {figures}")
    return figures
