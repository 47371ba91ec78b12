"""What we read from transformers' own files is what transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.rotary import inverse_frequencies
from nanocore.worker.models import read_model_config
from tests.model_families import (
    BUILDERS,
    FULL,
    SLIDING,
    SPECS,
    reference_model,
    rewrite_config,
    text_model,
)
from tests.tiny_models import EOS, MAX_MODEL_LEN


def parse(folder: Path) -> ModelConfig:
    return read_model_config(
        Settings.read(folder / "config.json"), Settings.read(folder / "generation_config.json")
    )


def load(folder: Path) -> Any:
    return reference_model(folder, dtype=torch.float32)


def first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_layer_is_read_as_transformers_builds_it(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    config, model = parse(folder), load(folder)
    text_config, decoder = model.config.get_text_config(), text_model(model)
    assert config.architecture == type(model).__name__
    assert config.longest_model_len == MAX_MODEL_LEN
    assert config.eos_token_ids == (EOS,)
    for i, layer in enumerate(first_of(decoder, "layers", "h")):
        attention, mlp = first_of(layer, "self_attn", "attn"), layer.mlp
        assert attention.head_dim == config.head_dim
        assert attention.scaling == config.query_scale
        window = getattr(attention, "sliding_window", getattr(text_config, "sliding_window", 0))
        assert (window or 0) == (config.sliding_window if config.layer_types[i] == SLIDING else 0)
        assert bool(getattr(attention, "use_rope", hasattr(decoder, "rotary_emb"))) == (
            config.rotation(i) != "none"
        )
        qkv = first_of(attention, "q_proj", "qkv_proj", "c_attn")
        assert (qkv.bias is not None) == config.attention_bias
        o_proj = first_of(attention, "o_proj", "c_proj")
        assert (o_proj.bias is not None) == config.o_proj_bias
        is_sparse = hasattr(mlp, "experts")
        assert is_sparse == (config.moe is not None and i in config.moe.sparse_layers)
        if not is_sparse:
            down_proj = first_of(mlp, "down_proj", "c_proj")
            assert (down_proj.bias is not None) == config.mlp_bias
    residual = getattr(text_config, "residual_multiplier", 1.0)  # divides the whole stream
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    assert config.embedding_scale == getattr(text_config, "embedding_multiplier", scale) / residual
    eps = first_of(text_config, "rms_norm_eps", "layer_norm_epsilon")
    assert config.rms_norm_eps == eps / residual**2
    assert config.logits_divisor == getattr(text_config, "logits_scaling", 1.0)
    assert config.tie_word_embeddings == (model.lm_head.weight is embedding.weight)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_rotation_is_read_as_transformers_builds_it(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    config, rotary = parse(folder), getattr(text_model(load(folder)), "rotary_emb", None)
    assert bool(config.rope) == (rotary is not None)
    for layer_type, rope in config.rope.items():
        theirs = getattr(rotary, f"{layer_type}_inv_freq", getattr(rotary, "inv_freq", None))
        own_length = MAX_MODEL_LEN // 8  # up to which dynamic NTK is plain, and LongRoPE short
        assert torch.equal(inverse_frequencies(rope, own_length), theirs)


@pytest.mark.parametrize(
    "name", [name for name in SPECS if not name.startswith(("gemma3", "gpt2"))]
)
def test_the_old_schema_of_rotary_settings_reads_the_same(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    new = parse(folder)

    def to_old(config: dict[str, Any]) -> None:
        config = config.get("text_config", config)
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if rope == {"type": "default"} else rope

    assert parse(rewrite_config(folder, to_old)) == new


def test_gemma3s_old_schema_reads_the_same(tmp_path: Path) -> None:
    folder = BUILDERS["gemma3"](tmp_path)
    new = parse(folder)

    def to_old(config: dict[str, Any]) -> None:
        ropes = config.pop("rope_parameters")
        config["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
        config["rope_theta"] = ropes[FULL].pop("rope_theta")
        config["rope_scaling"] = ropes[FULL]

    assert parse(rewrite_config(folder, to_old)) == new


def test_the_experts_of_a_saved_model_have_tensors_of_their_own(tmp_path: Path) -> None:
    """transformers fuses them in memory and takes them apart when it saves."""
    from safetensors import safe_open

    folder = BUILDERS["qwen3_moe"](tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shape = file.get_slice("model.layers.0.mlp.experts.7.down_proj.weight").get_shape()
    moe = parse(folder).moe
    assert moe is not None
    assert shape == [64, moe.intermediate_size]
    assert "num_local_experts" in json.loads((folder / "config.json").read_text())
