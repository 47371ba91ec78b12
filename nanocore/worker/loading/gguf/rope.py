"""The rotation that a GGUF model's settings and tensors describe, as config.json would.

llama.cpp keeps Llama 3's and LongRoPE's stretching as tensors: a factor for each pair of values.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.gguf.header import Header
from nanocore.worker.loading.gguf.metadata import Metadata
from nanocore.worker.loading.gguf.tensors import ROPE_FACTORS, find_tensor

_MAX_FACTORS: Final = 4096


def rope_settings(metadata: Metadata, headers: list[Header]) -> dict[str, Any]:
    """config.json's settings of the rotation.

    Raises:
        ModelFileError: a kind of stretching that is not served.
    """
    settings: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    shared, long, short = (_factors(headers, name) for name in ROPE_FACTORS)
    length = metadata.size("context_length")
    original = metadata.size("rope.scaling.original_context_length", length)
    scaling = _scaling(metadata, original)
    if long and short:
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["original_max_position_embeddings"] = original
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor", 1.0)
    elif shared:
        if scaling:
            raise ModelFileError(
                f"{metadata.path}: rope_freqs beside rope.scaling.type is not served"
            )
        # Llama 3's: whatever stretched a pair, its factor is there for every length.
        scaling = {"rope_type": "longrope", "long_factor": shared, "short_factor": shared}
        scaling |= {"original_max_position_embeddings": length, "attention_factor": 1.0}
    metadata.expect("rope.scaling.attn_factor", 1.0, default=1.0, unless=bool(long))
    return settings | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata, original: int) -> dict[str, Any]:
    """What `rope.scaling` says, but for factors that are tensors."""
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if kind == "yarn":
        metadata.expect("rope.scaling.yarn_attn_factor", 1.0, default=1.0)
        metadata.expect("rope.scaling.yarn_ext_factor", 1.0, default=1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in ("none", "linear", "longrope"):
        raise metadata.error("rope.scaling.type", "is not served; known: linear, longrope, yarn")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}


def _factors(headers: list[Header], name: str) -> list[float]:
    """Of a tensor; empty if there is none."""
    info = find_tensor(headers, name)
    if info is None:
        return []
    if info.type.name != "F32" or math.prod(info.shape) > _MAX_FACTORS:
        raise ModelFileError(
            f"{info.path}: {name} is {info.type.name} {list(info.shape)}: at most {_MAX_FACTORS} "
            "numbers of float32 are served"
        )
    try:
        with info.path.open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.num_bytes)
    except OSError as error:
        raise ModelFileError(f"{info.path}: {error.strerror or error}") from None
    if len(content) < info.num_bytes:
        raise ModelFileError(f"{info.path} became shorter while it was read")
    factors: list[float] = np.frombuffer(content, "<f4").tolist()
    return factors
