"""Models that also see images: the text part is read as transformers reads it, the rest not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.models import model_class, read_model_config
from tests.model_families import FULL, SLIDING

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
    "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
LINEAR = {"factor": 8.0, "rope_type": "linear"}
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "image_token_index": 10, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}  # fmt: skip
BF16 = {"dtype": "bfloat16"}
YARN: dict[str, Any] = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "gemma 3 4b": GEMMA3 | {"text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": LINEAR, "sliding_window": 1024, "model_type": "gemma3_text",
    }},
    "gemma 3 27b": GEMMA3 | {"text_config": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": LINEAR, "sliding_window": 1024, "model_type": "gemma3_text",
    }},
    "mistral small 3.1": MISTRAL3 | {"torch_dtype": "bfloat16", "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
    }},
    "ministral 3 8b": MISTRAL3 | BF16 | {"tie_word_embeddings": False, "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN, "sliding_window": None, "vocab_size": 131072,
    }},
    "what is left out of a mistral": MISTRAL3 | {"text_config": {
        "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512,
        "num_attention_heads": 16, "num_hidden_layers": 2, "vocab_size": 100,
    }},
    "what is left out of a ministral3": MISTRAL3 | {"text_config": {
        "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512,
        "model_type": "ministral3", "num_attention_heads": 16, "num_hidden_layers": 2,
        "vocab_size": 100, "tie_word_embeddings": False,
    }},
}  # fmt: skip
"""As they are published, but for what is said of images; the last two as sparse as can be."""


def parse(values: dict[str, Any]) -> ModelConfig:
    empty = Settings("generation_config.json", {})
    return read_model_config(Settings("config.json", values), empty)


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_read_as_transformers_reads_them(name: str) -> None:
    import transformers

    values = FILES[name]
    config = parse(values)
    config_class = getattr(transformers, values["architectures"][0]).config_class
    whole = config_class(**{k: v for k, v in values.items() if k != "architectures"})
    text = whole.get_text_config()
    attention = config.attention
    for theirs, ours in {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "head_dim": attention.head_dim, "intermediate_size": config.mlp.inner_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "rms_norm_eps": config.norm_eps,
    }.items():  # fmt: skip
        expected = getattr(text, theirs) or text.hidden_size // text.num_attention_heads
        assert ours == expected, theirs
    assert config.tie_word_embeddings == whole.tie_word_embeddings
    assert config.dtype == str(whole.dtype or "").removeprefix("torch.")
    ids = getattr(whole, "eos_token_id", None) or text.eos_token_id
    assert config.eos_token_ids == (tuple(ids) if isinstance(ids, list) else (ids,))
    scalar = getattr(text, "query_pre_attn_scalar", attention.head_dim)
    assert attention.scale == scalar**-0.5
    window = text.sliding_window
    types = getattr(text, "layer_types", None) or [SLIDING if window else FULL] * config.num_layers
    assert list(attention.layer_types) == types
    assert attention.sliding_window == (window or 0)
    for layer_type, rope in attention.rope.items():
        theirs = text.rope_parameters.get(layer_type, text.rope_parameters)
        assert (rope.kind, rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
        assert rope.factor == theirs.get("factor", 1.0)
        if rope.kind == "yarn":
            assert rope.original_max_position_embeddings == 16384
            assert config.longest_model_len == 16384  # queries grow beyond
        else:
            assert config.longest_model_len == text.max_position_embeddings


def changed(name: str, text: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return FILES[name] | top | {"text_config": FILES[name]["text_config"] | (text or {})}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            changed("gemma 3 4b", {"hidden_activation": "relu"}),
            'text_config.hidden_activation = "r',
        ),
        (changed("gemma 3 4b", {"rope_scaling": {"x": 1}}), "text_config.rope_scaling.x = 1 is an"),
        (changed("gemma 3 4b", {"model_type": "llama"}), 'text_config.model_type = "llama" is not'),
        (changed("gemma 3 4b", {"eos_token_id": 9}, eos_token_id=-1), "config.json: eos_token_id"),
        (
            changed("gemma 3 4b", {"eos_token_id": -1}, eos_token_id=None),
            "text_config.eos_token_id",
        ),
        (changed("mistral small 3.1", {"model_type": "qwen2"}), "known: mistral, ministral3"),
        (changed("mistral small 3.1", {"rope_scaling": YARN}), "llama_4_scaling_beta = 0.1 is an"),
        (changed("mistral small 3.1", tie_word_embeddings=1), "config.json: tie_word_embeddings"),
        (
            changed("mistral small 3.1") | {"text_config": None},
            "text_config.num_attention_heads is",
        ),
        (changed("mistral small 3.1") | {"text_config": []}, "text_config = .. cannot be read"),
    ],
)
def test_what_is_refused_is_named_with_its_place(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        parse(values)


@pytest.mark.parametrize("name", ["gemma 3 4b", "mistral small 3.1"])
def test_names_of_tensors_are_translated_in_both_spellings(name: str) -> None:
    common_name = model_class(FILES[name]["architectures"][0]).common_name
    layer = "layers.3.self_attn.q_proj.weight"
    for stored in (f"language_model.model.{layer}", f"model.language_model.{layer}"):
        assert common_name(stored) == f"model.{layer}"
    for stored in ("language_model.lm_head.weight", "lm_head.weight"):
        assert common_name(stored) == "lm_head.weight"
    for stored in ("vision_tower.x.weight", "multi_modal_projector.norm.weight"):
        assert common_name(stored) is common_name(f"model.{stored}") is None
    assert common_name("language_model.model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert common_name("audio_tower.x.weight") == "audio_tower.x.weight"  # to be refused


def test_a_tensor_in_both_spellings_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from nanocore.worker.loading.loader import check_weights
    from nanocore.worker.loading.weights import TensorEntry

    names = ("model.language_model.norm.weight", "language_model.model.norm.weight")
    save_file({name: torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    common_name = model_class("Gemma3ForConditionalGeneration").common_name
    with pytest.raises(ModelFileError, match="are both the same tensor of the model"):
        check_weights(tmp_path, {"model.norm.weight": TensorEntry((4,))}, common_name)
