"""Rotary tables against transformers', to the bit, for every kind of stretching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanocore.kernels.torch.attention import rope
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.rope_config import RopeConfig, read_rope
from nanocore.worker.layers.rotary import (
    attention_scaling,
    inverse_frequencies,
    rotary_table,
)

MAX_LEN = 512
HEAD_DIM = 24

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 128}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 1_000_000},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8},
    {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    LLAMA3 | {"rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    LLAMA3 | {"rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 128},
    YARN | {"rope_theta": 10_000.0, "factor": 4.0},
    YARN | {"rope_theta": 1_000_000.0, "factor": 4.0, "truncate": False},
    YARN | {"rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 0.7},
    YARN | {"rope_theta": 10_000.0, "factor": 16.0, "beta_fast": 8.0, "beta_slow": 3.0},
    YARN | {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    YARN | {"rope_theta": 10_000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"rope_theta": 10_000.0, "factor": 40.0, "mscale": 0.7},  # mscale alone is nothing
    YARN | {"rope_theta": 10_000.0, "factor": 1.0},
]


def llama_config(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
        rope_parameters=dict(rope),
    )


def read(rope: dict[str, Any], **others: Any) -> RopeConfig:
    values = {"max_position_embeddings": MAX_LEN, "rope_parameters": rope, **others}
    return read_rope(Settings(Path("config.json"), values), HEAD_DIM)["full_attention"]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_cos_and_sin_are_those_of_transformers_to_the_bit(rope: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    reference = LlamaRotaryEmbedding(llama_config(rope))
    config = read(rope)
    assert torch.equal(inverse_frequencies(config, MAX_LEN), reference.inv_freq)
    assert attention_scaling(config) == reference.attention_scaling
    positions = torch.arange(MAX_LEN)
    cos, sin = reference(torch.zeros(1), positions[None])
    table = rotary_table(config, MAX_LEN, torch.float32, torch.device("cpu"))
    for ours, theirs in zip((table.cos, table.sin), (cos[0], sin[0]), strict=True):
        assert ours.shape == (MAX_LEN, HEAD_DIM // 2)
        assert torch.equal(ours, theirs[:, : HEAD_DIM // 2])


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_every_stretching_changes_the_rotation(rope: dict[str, Any]) -> None:
    plain = read({"rope_theta": rope["rope_theta"]})
    config = read(rope)
    is_same = torch.equal(inverse_frequencies(config, 2048), inverse_frequencies(plain, 2048))
    assert is_same == (config.kind == "default" or config.factor == 1.0)


@pytest.mark.parametrize("served", [MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN])
def test_dynamic_ntk_has_one_base_for_the_served_length(served: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama_config(rope), "cpu", seq_len=served)
    assert torch.equal(inverse_frequencies(read(rope), served), theirs)


def test_dynamic_ntk_is_plain_up_to_the_models_length() -> None:
    dynamic = read({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0})
    plain = read({"rope_theta": 10_000.0})
    for served in (1, 100, MAX_LEN):
        assert torch.equal(inverse_frequencies(dynamic, served), inverse_frequencies(plain, served))


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128}
LONGROPES: list[dict[str, Any]] = [
    LONGROPE | {"rope_theta": 10_000.0},
    LONGROPE | {"rope_theta": 10_000.0, "factor": 32.0},
    LONGROPE | {"rope_theta": 1e6, "attention_factor": 1.3},
    LONGROPE | {"rope_theta": 10_000.0, "original_max_position_embeddings": MAX_LEN},
    LONGROPE | {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
]


@pytest.mark.parametrize("rope", LONGROPES, ids=str)
def test_longrope_has_one_table_for_the_served_length(rope: dict[str, Any]) -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    num_pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    rope = rope | {
        "short_factor": [1.0 + 0.1 * i for i in range(num_pairs)],
        "long_factor": [2.0**i for i in range(num_pairs)],
    }
    original = rope["original_max_position_embeddings"]
    theirs = Phi3Config(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=MAX_LEN,
        original_max_position_embeddings=original, rope_parameters=dict(rope),
    )  # fmt: skip
    reference, config = Phi3RotaryEmbedding(theirs), read(rope)
    for served in (100, original, original + 1, MAX_LEN):
        cos, sin = reference(torch.zeros(1), torch.arange(served)[None])
        table = rotary_table(config, served, torch.float32, torch.device("cpu"))
        for ours, expected in zip((table.cos, table.sin), (cos[0], sin[0]), strict=True):
            assert torch.equal(ours, expected[:, :num_pairs])
    assert attention_scaling(config) == reference.attention_scaling


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_static_ntk_slows_the_last_pair_by_its_factor_and_others_by_a_root_of_it(
    theta: float, factor: float
) -> None:
    """Pair m of n, counted from 1, by factor ** (m / n): transformers has no such kind."""
    config = read({"rope_type": "ntk", "rope_theta": theta, "factor": factor})
    n = HEAD_DIM // 2
    expected = [theta ** -((m - 1) / n) / factor ** (m / n) for m in range(1, n + 1)]
    for served in (1, MAX_LEN, 10 * MAX_LEN):
        ours = inverse_frequencies(config, served)
        torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-6, atol=0)
    assert attention_scaling(config) == 1.0


def test_a_partial_rotation_covers_its_part_of_the_head() -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    theirs = Phi3RotaryEmbedding(
        Phi3Config(hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=dict(rope))
    )
    config = read(rope)
    assert config.rotary_dim == 18
    assert torch.equal(inverse_frequencies(config, MAX_LEN), theirs.inv_freq)
    assert read({}, partial_rotary_factor=0.75) == config


def test_a_table_in_another_dtype_is_rounded_once() -> None:
    config = read(ROPES[7])
    exact = rotary_table(config, MAX_LEN, torch.float32, torch.device("cpu"))
    table = rotary_table(config, MAX_LEN, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(table.cos, exact.cos.bfloat16())
    assert torch.equal(table.sin, exact.sin.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_rotation_no_bit_of_a_head_changes(dtype: torch.dtype) -> None:
    table = rotary_table(None, MAX_LEN, dtype, torch.device("cpu"))
    heads = torch.randn(MAX_LEN, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(rope(heads, table.cos, table.sin), heads)
