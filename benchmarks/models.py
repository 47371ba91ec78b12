"""Makes the models that benchmarks run on: folders of a given shape with random weights.

Speed depends on shapes and not on what a model has learned, so nothing is downloaded. Weights are
seeded by tensor name, and scaled so that activations stay near one and logits are spread: outputs
are finite and vary with the context. The folders have no tokenizer; benchmarks use token ids.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_WEIGHTS_FILE = "model.safetensors"
_LOGIT_STD = 3.0
_BLOCK_GAIN = 3.0
"""How far blocks outweigh the token's own embedding, which a tied head would only echo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a Qwen3 model, named as config.json names them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",  # both names: older and newer transformers
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            **sizes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape(ModelShape):
    """Sizes of a Qwen3.5 model: Gated DeltaNet, but in every full_attention_interval-th layer."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = ModelShape.config(self) | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        }
        del config["rope_theta"]
        return config


SHAPES: dict[str, ModelShape] = {
    # 67M parameters: large enough to be bound by memory, small enough for quick repetitions.
    "small": ModelShape(
        hidden_size=512,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=32768,
        max_position_embeddings=8192,
    ),
    # The sizes of Qwen3-0.6B (Qwen3 technical report, 2025).
    "qwen3-0.6b": ModelShape(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
}
SHAPES["qwen3-8b"] = replace(
    SHAPES["qwen3-0.6b"],
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    intermediate_size=12288,
    tie_word_embeddings=False,
)
SHAPES["tiny"] = ModelShape(  # for rehearsals
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=1024,
)
SHAPES["tiny-untied"] = replace(SHAPES["tiny"], hidden_size=128, tie_word_embeddings=False)
SHAPES["qwen3.5-0.8b"] = HybridShape(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=3584,
    vocab_size=248320,
    max_position_embeddings=32768,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
)
SHAPES["tiny-hybrid"] = HybridShape(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=4096,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    full_attention_interval=2,
)
for _name in ("qwen3.5-0.8b", "tiny-hybrid"):  # the same with attention in every layer
    SHAPES[f"{_name}-dense"] = replace(SHAPES[_name], full_attention_interval=1)


def cached_model(name: str) -> Path:
    """The folder of a shape's model in the user's cache, made there on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "nanocore" / "benchmark-models" / name
    config = folder / "config.json"
    if not config.exists() or json.loads(config.read_text()) != SHAPES[name].config():
        make_model(SHAPES[name], folder)
    return folder


def model_folder(name: str) -> Path:
    """The folder of a shape, made on first use, or the folder of that name."""
    return cached_model(name) if name in SHAPES else Path(name)


def write_config(shape: ModelShape, folder: Path) -> None:
    """The folder's config.json; weights may also be made by who reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")


def make_model(shape: ModelShape, folder: Path) -> None:
    """Write a model folder, replacing what was there; all of it or nothing."""
    import transformers  # takes long

    config = shape.config()
    model_class = getattr(transformers, config["architectures"][0])
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with torch.device("meta"):
            model = model_class(model_class.config_class(**config))
        is_hybrid = isinstance(shape, HybridShape)
        weights = {
            name: _random_tensor(name, tuple(empty.shape), is_hybrid)
            for name, empty in model.named_parameters()
        }
        save_file(weights, unfinished / _WEIGHTS_FILE, metadata={"format": "pt"})
        write_config(shape, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _random_tensor(name: str, size: tuple[int, ...], is_hybrid: bool) -> torch.Tensor:
    """A seeded bfloat16 tensor, scaled by what it is for."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(size, generator=generator)
    if len(size) == 1:  # norms, and decays
        values.mul_(0.1).add_(_mean(name) if is_hybrid else 1.0)
    else:
        values.mul_(_gain(name) / math.sqrt(size[-1]))
    return values.to(torch.bfloat16)


def _mean(name: str) -> float:
    """Mean of a Qwen3.5's vector: norms but one are stored less 1, and states last 50 tokens."""
    if name.endswith("dt_bias"):
        return -4.0
    return float("linear_attn.norm" in name)


def _gain(name: str) -> float:
    """Factor on a matrix that would otherwise keep the size of what it is given."""
    if "embed_tokens" in name or "lm_head" in name:
        return _LOGIT_STD  # the final norm makes hidden states of length sqrt(hidden_size)
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return _BLOCK_GAIN
    return 1.0
