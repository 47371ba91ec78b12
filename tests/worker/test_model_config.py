"""config.json in the spellings that exist, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.model_config import load_model_config

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def write(folder: Path, generation: dict | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_defaults_are_those_of_the_architecture(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path))
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_both_spellings_of_rope_are_read(tmp_path: Path, rope: dict) -> None:
    assert load_model_config(write(tmp_path, **rope)).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"architectures": []}, "none"),
        ({"architectures": ["LlamaForCausalLM"]}, "Qwen3ForCausalLM"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, changes: dict, word: str) -> None:
    with pytest.raises(ModelFileError, match=word):
        load_model_config(write(tmp_path, **changes))


def test_the_generation_configs_eos_ids_win(tmp_path: Path) -> None:
    folder = write(tmp_path, generation={"eos_token_id": [5, 7]}, eos_token_id=3)
    assert load_model_config(folder).eos_token_ids == (5, 7)
    (folder / "generation_config.json").unlink()
    assert load_model_config(folder).eos_token_ids == (3,)


def test_code_that_a_config_points_to_is_not_looked_at(tmp_path: Path) -> None:
    foreign = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    assert load_model_config(write(tmp_path, **foreign)).architecture == "Qwen3ForCausalLM"


def test_a_config_that_is_no_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_model_config(tmp_path)
