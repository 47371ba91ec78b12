"""--hf-overrides: values in place of config.json's, checked as if they stood there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.models import load_model_config
from tests.model_families import BUILDERS, rewrite_config
from tests.worker.test_model_config import BASE, write

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NTK = {"rope_type": "ntk", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"]}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"]}
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.mark.parametrize(
    ("file", "overrides", "same_file"),
    [
        ({}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({}, {"max_position_embeddings": 99}, {"max_position_embeddings": 99}),
        ({"rope_theta": 5e5}, {"rope_scaling": YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_scaling": YARN},
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 5e5}},
            {"rope_scaling": None},
            {"rope_theta": 5e5},
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 7e5}, {"rope_theta": 7e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": YARN},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        ({}, {"rope_scaling": NTK}, {"rope_scaling": NTK}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_scaling": NTK},
            {"rope_parameters": NTK | {"rope_theta": 5e5}},
        ),
        (
            PHI3 | {"rope_theta": 5e5},
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
            PHI3
            | {
                "rope_theta": 5e5,
                "rope_scaling": LONGROPE,
                "original_max_position_embeddings": 256,
            },
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
            {"rope_scaling": None},
            PHI3,
        ),
        (
            GEMMA3 | {"text_config": BASE},
            {"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}},
            GEMMA3
            | {"text_config": BASE | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}},
        ),
        (
            GEMMA3 | {"text_config": BASE | {"rope_parameters": NESTED}},
            {"text_config": {"rope_scaling": YARN}},
            GEMMA3
            | {
                "text_config": BASE
                | {
                    "rope_parameters": NESTED | {"full_attention": YARN | {"rope_theta": 5e5}},
                },
            },
        ),
        (
            MISTRAL3 | {"text_config": BASE | {"rope_theta": 5e5}},
            {"text_config": {"rope_scaling": NTK, "max_position_embeddings": 256}},
            MISTRAL3
            | {
                "text_config": BASE
                | {"rope_theta": 5e5, "rope_scaling": NTK, "max_position_embeddings": 256},
            },
        ),
        (
            MISTRAL3 | {"text_config": BASE, "eos_token_id": 3},
            {"eos_token_id": [5], "tie_word_embeddings": False},
            MISTRAL3 | {"text_config": BASE, "eos_token_id": 5, "tie_word_embeddings": False},
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": NESTED},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": NESTED
                | {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                },
            },
        ),
    ],
    ids=str,
)
def test_a_value_counts_as_if_it_stood_in_the_file(
    tmp_path: Path, file: dict[str, Any], overrides: dict[str, Any], same_file: dict[str, Any]
) -> None:
    overridden = load_model_config(write(tmp_path, **file), overrides)
    assert overridden == load_model_config(write(tmp_path, **same_file))
    assert overridden != load_model_config(write(tmp_path, **file))


def test_the_file_stays_as_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path)
    before = (folder / "config.json").read_bytes()
    load_model_config(folder, {"rope_scaling": YARN})
    assert (folder / "config.json").read_bytes() == before


def test_a_wrong_value_is_refused_as_the_files_and_the_flag_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with pytest.raises(ModelFileError) as caught:
        load_model_config(folder, {"rope_scaling": YARN | {"factor": 0.5}})
    assert str(caught.value) == (
        f"{folder}/config.json with --hf-overrides: rope_scaling.factor = 0.5 must be at least 1 "
        "and at most 1000000"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("rope_scalling", ", the nearest is rope_scaling"), ("qqq", "; remove it")],
)
def test_a_name_that_nothing_reads_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(write(tmp_path), {name: YARN})
    assert str(caught.value) == (f"--hf-overrides: {name} is not a setting of this model{remedy}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"text_config": {"rope_scalling": NTK}},
            "text_config.rope_scalling .*text_config.rope_sc",
        ),
        ({"rope_scaling": NTK}, "rope_scaling .*, the nearest is text_config.rope_scaling"),
        ({"vision_config": {}}, "vision_config is not a setting of this model"),
        ({"quantization_config": {}}, "quantization_config .* is read from config.json alone"),
        ({"text_config": {"tie_word_embeddings": True}}, "nearest is tie_word_embeddings"),
    ],
)
def test_of_a_text_part_too_nothing_is_overridden_that_is_not_read(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model_config(write(tmp_path, **GEMMA3, text_config=BASE), overrides)


def test_a_wrong_value_of_a_text_part_is_named_with_its_place(tmp_path: Path) -> None:
    folder = write(tmp_path, **GEMMA3, text_config=BASE)
    with pytest.raises(ModelFileError) as caught:
        load_model_config(folder, {"text_config": {"rope_scaling": NTK | {"factor": 0.5}}})
    assert str(caught.value) == (
        f"{folder}/config.json with --hf-overrides: text_config.rope_scaling.factor = 0.5 must be "
        "at least 1 and at most 1000000"
    )


def test_another_architecture_can_be_named(tmp_path: Path) -> None:
    folder = rewrite_config(
        BUILDERS["llama"](tmp_path), lambda config: config.update(architectures=["LlamaFork"])
    )
    with pytest.raises(ModelFileError, match="nearest that is served is LlamaForCausalLM"):
        load_model_config(folder)
    config = load_model_config(folder, {"architectures": ["LlamaForCausalLM"]})
    assert config.architecture == "LlamaForCausalLM"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaFork"]
