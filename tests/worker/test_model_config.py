"""config.json in the spellings and families that exist, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker import models
from nanocore.worker.config.generation_config import read_generation_defaults
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.models import (
    ARCHITECTURES,
    load_model_config,
    model_class,
    read_model_config,
)
from nanocore.worker.models.gemma import Gemma2Model, GemmaConfig
from nanocore.worker.models.qwen import SharedExpertConfig
from nanocore.worker.placement import Placement

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
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def write(folder: Path, generation: dict | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def has_experts(name: str) -> bool:
    return any(one in name for one in ("Moe", "Mixtral", "Qwen3Next"))


def parse(family: str, without: str = "", **changes: Any) -> ModelConfig:
    """The config of a family; changes with the value None are null in the file."""
    name = f"{family}ForCausalLM"
    values = BASE | {"num_hidden_layers": 8, "architectures": [name]} | changes
    if has_experts(name):
        values = EXPERTS | values
    values.pop(without, None)
    return read_model_config(
        Settings(Path("config.json"), values), Settings(Path("generation_config.json"), {})
    )


def sliding(config: ModelConfig) -> list[int]:
    return [i for i, kind in enumerate(config.attention.layer_types) if kind == SLIDING]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_file_leaves_out_is_transformers_default(name: str) -> None:
    import transformers

    values = BASE | {"num_hidden_layers": 30, "num_attention_heads": 32, "hidden_size": 256}
    values |= {"vocab_size": 200_000}  # the defaults of eos_token_id are in it
    values |= EXPERTS if has_experts(name) else {}
    del values["num_key_value_heads"]
    config_class = getattr(transformers, name).config_class
    values = {config_class.attribute_map.get(k, k): v for k, v in values.items()}
    if name.endswith("ForConditionalGeneration"):
        values = {"text_config": values}
    values |= {"architectures": [name]}
    config = read_model_config(
        Settings(Path("config.json"), values), Settings(Path("generation_config.json"), {})
    )
    whole = config_class(**{k: v for k, v in values.items() if k != "architectures"})
    reference = whole.get_text_config()
    attention = config.attention
    assert attention.num_kv_heads == getattr(reference, "num_key_value_heads", 32)
    assert config.attention.head_dim == (getattr(reference, "head_dim", None) or 256 // 32)
    epsilons = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    eps = next(getattr(reference, key) for key in epsilons if hasattr(reference, key))
    assert config.norm_eps == eps
    assert config.tie_word_embeddings == whole.tie_word_embeddings
    settings = ("activation_function", "hidden_activation", "hidden_act")
    found = (getattr(reference, key) for key in settings if hasattr(reference, key))
    activation = next(found, "silu")
    kinds = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
    assert config.mlp.activation == kinds[activation]
    eos = reference.eos_token_id
    assert config.eos_token_ids == (() if eos is None else (eos,))
    ropes = getattr(reference, "rope_parameters", {})
    assert bool(attention.rope) == bool(ropes)
    for layer_type, rope in attention.rope.items():
        theirs = ropes.get(layer_type, ropes)
        assert rope.theta == theirs["rope_theta"]
        rotary_share = theirs.get("partial_rotary_factor", 1.0)
        assert rope.rotary_dim == int(config.attention.head_dim * rotary_share)
    window = getattr(reference, "sliding_window", None)
    is_listed = bool(getattr(reference, "layer_types", None))
    types = reference.layer_types if is_listed else [SLIDING if window else FULL] * 30
    linear = {i for i, kind in enumerate(types) if kind == "linear_attention"}
    assert getattr(config, "linear_layers", set()) == linear
    assert list(attention.layer_types) == [FULL if i in linear else types[i] for i in range(30)]
    assert attention.sliding_window == (window if SLIDING in types else 0)
    assert attention.softcap == (getattr(reference, "attn_logit_softcapping", None) or 0.0)
    cap = getattr(reference, "final_logit_softcapping", None) or 0.0
    assert getattr(config, "logits_softcap", 0.0) == cap
    scalar = getattr(reference, "query_pre_attn_scalar", config.attention.head_dim)
    assert attention.scale == getattr(reference, "attention_multiplier", scalar**-0.5)


@pytest.mark.parametrize(
    ("family", "changes", "qkv", "o_proj", "mlp"),
    [
        ("Qwen2", {}, True, False, False),
        ("Qwen2Moe", {}, True, False, False),
        ("Qwen2Moe", {"qkv_bias": False}, False, False, False),
        ("Llama", {}, False, False, False),
        ("Llama", {"attention_bias": True}, True, True, False),
        ("Llama", {"mlp_bias": True}, False, False, True),
        ("Qwen3", {"attention_bias": True}, True, True, False),
        ("Gemma3", {"attention_bias": True}, True, True, False),
        ("Mistral", {"attention_bias": False}, False, False, False),
        ("Gemma", {"attention_bias": True}, True, True, False),
        ("SeedOss", {}, True, False, False),
        ("SeedOss", {"attention_bias": False, "mlp_bias": True}, False, False, True),
        ("SeedOss", {"attention_bias": False, "attention_out_bias": True}, False, True, False),
    ],
)
def test_biases(family: str, changes: dict, qkv: bool, o_proj: bool, mlp: bool) -> None:
    config = parse(family, **changes)
    attention = config.attention
    assert (attention.bias, attention.o_proj_bias, config.mlp.bias) == (qkv, o_proj, mlp)


@pytest.mark.parametrize(
    ("family", "changes", "layers", "window"),
    [
        ("Mistral", {"sliding_window": 40}, range(8), 40),
        ("Mistral", {}, range(8), 4096),
        ("Mistral", {"sliding_window": None}, (), 0),
        ("Ministral", {"layer_types": [FULL, SLIDING] * 4}, (1, 3, 5, 7), 4096),
        ("Ministral", {"sliding_window": 40}, range(8), 40),
        ("Ministral3", {"sliding_window": 40}, range(8), 40),
        ("Phi3", {"sliding_window": 40}, range(8), 40),
        ("Phi3", {}, (), 0),
        ("Mixtral", {"sliding_window": 40}, range(8), 40),
        ("Mixtral", {}, (), 0),
        ("Qwen2", {"sliding_window": 40}, (), 0),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 6}, (6, 7), 4096),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0}, range(8), 4096),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": None}, (), 0),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 5}, (0, 2, 4), 4096),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 7}, range(8), 7),
        ("Gemma2", {"sliding_window": 40}, (0, 2, 4, 6), 40),
        ("Gemma2", {"layer_types": [FULL] * 7 + [SLIDING]}, (7,), 4096),
        ("Gemma3", {"sliding_window": 40}, (0, 1, 2, 3, 4, 6, 7), 40),
        ("Gemma3", {"sliding_window_pattern": 4}, (0, 1, 2, 4, 5, 6), 4096),
        ("Gemma3", {"layer_types": [SLIDING] + [FULL] * 7}, (0,), 4096),
        ("Llama", {"layer_types": [FULL] * 8}, (), 0),
        ("SmolLM3", {"sliding_window": 40}, (), 0),
        ("SmolLM3", {"use_sliding_window": True, "sliding_window": 40}, (3, 7), 40),
        ("SmolLM3", {"use_sliding_window": True}, (), 0),
    ],
)
def test_which_layers_have_a_window(
    family: str, changes: dict, layers: tuple[int, ...], window: int
) -> None:
    config = parse(family, **changes)
    assert sliding(config) == list(layers)
    assert config.attention.sliding_window == window


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {3, 7}),
        ({"no_rope_layer_interval": 3}, {2, 5}),
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, set(range(8))),
        ({"no_rope_layers": [1, 0] * 5, "no_rope_layer_interval": 3}, {1, 3, 5, 7}),
    ],
)
def test_which_layers_do_not_rotate(changes: dict, layers: set[int]) -> None:
    attention = parse("SmolLM3", **changes).attention
    assert {i for i in range(8) if attention.rotation(i) == "none"} == layers
    assert parse("Llama", **changes).attention.unrotated_layers == set()


def test_gemma2_caps_scales_and_ties() -> None:
    config = parse("Gemma2", query_pre_attn_scalar=144, head_dim=16)
    model = Gemma2Model(config, Placement(torch.float32, torch.device("meta")))
    assert (config.attention.softcap, model.logits_softcap) == (50.0, 30.0)
    assert config.attention.scale == 144**-0.5
    assert model.embedding_factor == 8.0
    assert config.tie_word_embeddings
    assert parse("Gemma2", attn_logit_softcapping=None).attention.softcap == 0.0
    gemma3 = parse("Gemma3", final_logit_softcapping=5)
    assert isinstance(gemma3, GemmaConfig)
    assert gemma3.logits_softcap == 5.0


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"mlp_only_layers": [0, 5]}, {1, 2, 3, 4, 6, 7}),
        ({"decoder_sparse_step": 2}, {1, 3, 5, 7}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1, 5, 7}),
    ],
)
def test_which_layers_have_experts(changes: dict, layers: set[int]) -> None:
    moe = parse("Qwen3Moe", **changes).moe
    assert moe is not None
    assert moe.sparse_layers == layers
    assert (moe.num_experts, moe.num_experts_per_tok, moe.inner_size) == (8, 2, 32)
    assert not moe.norm_topk_prob
    assert not isinstance(moe, SharedExpertConfig)


def test_mixtral_has_experts_in_every_layer_and_normalizes_their_weights() -> None:
    moe = parse("Mixtral", num_local_experts=4, num_experts_per_tok=3, norm_topk_prob=False).moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_tok, moe.inner_size) == (4, 3, 128)
    assert moe.norm_topk_prob
    assert moe.sparse_layers == set(range(8))
    left_out = parse("Mixtral", without="num_experts_per_tok").moe
    assert left_out is not None
    assert (left_out.num_experts, left_out.num_experts_per_tok) == (8, 2)


def test_lfm2_moe_begins_with_dense_layers_whose_width_is_not_adjusted() -> None:
    config = parse("Lfm2Moe", num_dense_layers=3, block_ff_dim=96, block_auto_adjust_ff_dim=True)
    moe = config.moe
    assert moe is not None
    assert moe.sparse_layers == {3, 4, 5, 6, 7}
    assert (config.mlp.inner_size, moe.inner_size) == (128, 32)
    assert (moe.score, moe.has_bias, moe.epsilon, moe.factor) == ("sigmoid", True, 1e-6, 1.0)
    assert moe.norm_topk_prob
    plain = {"norm_topk_prob": False, "use_expert_bias": False, "routed_scaling_factor": 2}
    other = parse("Lfm2Moe", **plain).moe
    assert other is not None
    assert other.sparse_layers == {2, 3, 4, 5, 6, 7}
    assert (other.norm_topk_prob, other.has_bias, other.factor) == (False, False, 2.0)


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | YARN
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("scaling", "top", "max_model_len"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {}, 1024),
        ({"rope_type": "ntk", "factor": 2.0}, {}, 1024),
        ({"rope_type": "yarn"} | YARN, {}, 1024),
        ({"type": "yarn", "factor": 4.0}, {}, 2048),
        ({"type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3"} | LLAMA3, {}, 512),
        ({"rope_type": "default"}, {}, 512),
    ],
)
def test_the_served_length_follows_the_stretching(
    scaling: dict, top: dict, max_model_len: int
) -> None:
    old = parse("Llama", rope_scaling=scaling, rope_theta=5e5, **top)
    new = parse("Llama", rope_parameters=scaling | {"rope_theta": 5e5}, **top)
    assert old == new
    assert old.max_model_len == old.longest_model_len == max_model_len


@pytest.mark.parametrize(
    ("family", "scaling", "top", "lengths"),
    [
        ("Llama", {"type": "dynamic", "factor": 3.0}, {}, (512, 1536)),
        ("Phi3", LONGROPE, {"original_max_position_embeddings": 128}, (128, 512)),
        ("Phi3", LONGROPE | {"type": "su"}, {"original_max_position_embeddings": 64}, (64, 512)),
        ("Phi3", LONGROPE, {}, (512, 512)),
        ("Phi3", LONGROPE, {"max_position_embeddings": 131_072}, (4096, 131_072)),
        ("Llama", LONGROPE | {"original_max_position_embeddings": 128}, {}, (128, 512)),
        ("Llama", LONGROPE, {}, (512, 512)),
    ],
)
def test_what_bends_every_position_must_be_asked_for(
    family: str, scaling: dict, top: dict, lengths: tuple[int, int]
) -> None:
    config = parse(family, rope_scaling=scaling, **top)
    assert (config.max_model_len, config.longest_model_len) == lengths


@pytest.mark.parametrize(("beta", "length"), [(0.1, 256), (0, 1024)])
def test_ministral3_serves_what_its_queries_do_not_grow_in(beta: float, length: int) -> None:
    rope = {"rope_type": "yarn", "max_position_embeddings": 512, "llama_4_scaling_beta": beta}
    config = parse("Ministral3", rope_parameters=rope | YARN)
    assert (config.max_model_len, config.longest_model_len) == (length, length)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_the_gelu_of_gemma_is_the_tanh_approximation(activation: str) -> None:
    assert parse("Gemma", hidden_act=activation).mlp.activation == "gelu"
    both = {"hidden_act": activation, "hidden_activation": "gelu_pytorch_tanh"}
    assert parse("Gemma", **both) == parse("Gemma", hidden_activation=None) == parse("Gemma")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Llama", {"hidden_act": "relu"}, 'hidden_act = "relu"'),
        ("Gemma2", {"hidden_activation": "gelu"}, 'hidden_activation = "gelu"'),
        ("Gemma3", {"vision_config": {"depth": 3}}, "vision_config"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ("Gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30"),
        ("Llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ("Mistral", {"attention_bias": True}, "attention_bias = true"),
        ("Phi3", {"attention_bias": True}, "attention_bias = true"),
        ("Qwen2", {"attention_bias": False}, "attention_bias = false"),
        ("Qwen3", {"mlp_bias": True}, "mlp_bias = true"),
        ("Llama", {"sliding_window": 32}, "sliding_window = 32"),
        ("Llama", {"layer_types": [SLIDING] * 8}, "layer_types"),
        ("Gemma2", {"sliding_window": None}, "need a sliding_window"),
        ("Qwen2", {"layer_types": [SLIDING] * 8}, "need a sliding_window"),
        ("Gemma3", {"layer_types": [FULL] * 7}, "must have 8 entries"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 8}, "known: full_attention, sliding"),
        ("Llama", {"rope_scaling": {"rope_type": "xdrope"}}, r"rope_scaling.rope_type = .xdrope"),
        ("Phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor = null is needed by"),
        ("Phi3", {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 9}}, "has 9 numbers; 8 are"),
        ("Phi3", {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5}, "has 8 numbers; 4 are"),
        (
            "Phi3",
            {"rope_scaling": LONGROPE | {"short_mscale": 1.1}},
            "short_mscale = 1.1 is an unk",
        ),
        ("Phi3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type = yarn"),
        ("Llama", {"rope_scaling": {"type": "ntk"}}, "factor = null is needed by rope_type ntk"),
        ("Llama", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}}, "mixed_b = 0.6"),
        ("Mistral", {"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1"),
        (
            "Ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": -1}},
            "rs.llama_4_scaling_beta = -1 must be",
        ),
        ("Gemma", {"hidden_act": "gelu_new_"}, 'hidden_act = "gelu_new_" is not implemented'),
        ("SeedOss", {"sliding_window": 9}, "sliding_window = 9 is not implemented for this arch"),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = linear"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "factor = null is needed by rope_type lin"),
        ("Llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "high_freq_factor"),
        ("Llama", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section = .1. is an unknown"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Phi3", {"partial_rotary_factor": 0.7}, "makes 11 of head_dim = 16 rotate"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "Gemma 3's layer types"),
        (
            "Llama",
            {"num_key_value_heads": 3},
            r"cannot share 3 KV heads \(num_key",
        ),
        ("Llama", {"hidden_size": 66}, "hidden_size = 66 is not divisible by 4 heads"),
        ("Llama", {"rope_scaling": 4}, "rope_scaling = 4 cannot be read"),
        ("Llama", {"without": "hidden_size"}, "hidden_size is missing"),
        ("Qwen3Moe", {"without": "num_experts"}, "num_experts is missing"),
        (
            "SmolLM3",
            {"no_rope_layers": [1] * 7},
            "no_rope_layers = .1,1,1,1,1,1,1. must have 8 ent",
        ),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier = 0 must be at least 0.0001"),
        ("Granite", {"logits_scaling": -8}, "logits_scaling = -8 must be at least 0.0001"),
        ("SmolLM3", {"no_rope_layers": [2] * 8}, "0 for a layer that does not rotate"),
        ("SmolLM3", {"layer_types": [SLIDING] * 8}, "need a sliding_window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(family: str, changes: dict, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as error:
        parse(family, **changes)
    assert str(error.value).startswith("config.json: ")


GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 2,
    "n_head": 4, "n_positions": 128, "n_ctx": 128, "n_inner": None,
}  # fmt: skip


def parse_gpt2(without: str = "", **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (GPT2 | changes).items() if name != without}
    return read_model_config(
        Settings(Path("config.json"), values), Settings(Path("generation_config.json"), {})
    )


def test_gpt2s_names_are_read() -> None:
    config = parse_gpt2()
    attention = config.attention
    assert (config.hidden_size, config.mlp.inner_size, config.num_layers) == (64, 256, 2)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 16)
    assert config.max_model_len == config.longest_model_len == 128
    assert [attention.rotation(i) for i in range(2)] == ["none", "none"]
    assert attention.scale == 0.25
    assert parse_gpt2(scale_attn_weights=False).attention.scale == 1.0
    assert parse_gpt2(n_inner=100).mlp.inner_size == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_embd": 0}, "n_embd = 0 must be at least 1"),
        ({"without": "n_positions"}, "n_positions is missing"),
        ({"layer_norm_epsilon": 2}, "layer_norm_epsilon = 2 must be at least"),
        ({"activation_function": "relu"}, 'activation_function = "relu" is not implemented'),
        ({"activation_function": "gelu"}, 'activation_function = "gelu" is not implemented'),
        ({"add_cross_attention": True}, "add_cross_attention = true is not implemented"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"rope_theta": 1e6}, "rope_theta = 1000000.0 is not implemented"),
        ({"sliding_window": 32}, "sliding_window = 32"),
    ],
)
def test_what_gpt2_cannot_do_is_refused_by_its_own_names(changes: dict, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        parse_gpt2(**changes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_type_stands_for_the_architecture_that_transformers_knows_by_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    types = [kind for kind, found in models._BY_MODEL_TYPE.items() if found == name]
    assert name in [theirs.get(kind) for kind in types]
    source = tmp_path / "config.json"
    for values in ({"architectures": None}, {"architectures": []}, {}):
        settings = Settings(source, values | {"model_type": types[-1]})
        assert models._by_model_type(settings) == [name]
    (message,) = caplog.messages
    assert message == f"{source} names no architectures: {types[-1]!r} is {name}"


def test_a_configuration_with_a_byte_order_mark_and_no_architectures_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = BASE | {"architectures": None, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8-sig")
    assert load_model_config(tmp_path).architecture == "Qwen3ForCausalLM"
    assert "config.json begins with a byte order mark, which is skipped" in caplog.text
    assert "config.json names no architectures: 'qwen3' is Qwen3ForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": []}, r"architectures = \[\] must name what the model is"),
        ({"architectures": None}, "architectures = null must name what the model is"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is unknown"),
        ({"architectures": ["LlavaForCausalLM"]}, "architecture 'LlavaForCausalLM' is unknown"),
    ],
)
def test_an_unknown_architecture_lists_the_known_ones(
    tmp_path: Path, changes: dict, words: str
) -> None:
    with pytest.raises(ModelFileError, match=words) as error:
        load_model_config(write(tmp_path, **changes))
    assert str(error.value).endswith(f"known: {', '.join(ARCHITECTURES)}")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen4NextForCausalLM", "Qwen3NextForCausalLM"),
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("Gemma2ForCausalLn", "Gemma2ForCausalLM"),
        ("Phi3SmallForCausalLM", "Phi3ForCausalLM"),
        ("Phi4MMForCausalLM", "Phi3ForCausalLM"),
        ("Gemma3ForCausalLn", "Gemma3ForCausalLM"),
        ("Olmo3ForCausalLM", "Olmo2ForCausalLM"),
        ("OlmoForCausalLM", "Olmo2ForCausalLM"),
        ("GraniteMoeForCausalLM", "GraniteForCausalLM"),
        ("MllamaForConditionalGeneration", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
    ],
)
def test_an_unknown_architecture_names_the_one_spelled_most_alike(
    tmp_path: Path, name: str, nearest: str
) -> None:
    with pytest.raises(
        ModelFileError, match=rf"the nearest that is served is {nearest}\w*; known:"
    ):
        load_model_config(write(tmp_path, architectures=[name]))


@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "GptOssForCausalLM",
        "MambaForCausalLM", "JambaForCausalLM", "ErnieForCausalLM", "MiniMaxForCausalLM",
        "XLNetLMHeadModel", "FalconForCausalLM", "T5ForConditionalGeneration", "", "X" * 10**6,
    ],
)  # fmt: skip
def test_an_unknown_architecture_that_nothing_is_like_names_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match="is unknown; known: "):
        load_model_config(write(tmp_path, architectures=[name]))


def test_the_registry_needs_no_torch_and_every_name_in_it_is_a_model() -> None:
    code = (
        "import sys, nanocore.worker.models as models;"
        "print(*{'torch'} & {*sys.modules}, *models.ARCHITECTURES)"
    )
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert names.stdout.split() == list(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert issubclass(model_class(name), DecoderModel)


def test_the_generation_configs_eos_ids_win(tmp_path: Path) -> None:
    folder = write(tmp_path, generation={"eos_token_id": [5, 7]}, eos_token_id=3)
    assert load_model_config(folder).eos_token_ids == (5, 7)
    (folder / "generation_config.json").unlink()
    assert load_model_config(folder).eos_token_ids == (3,)


def test_null_eos_in_the_file_is_none_at_all() -> None:
    assert parse("Llama").eos_token_ids == (2,)
    assert parse("Llama", eos_token_id=None).eos_token_ids == ()


def test_generation_defaults_are_read_whether_or_not_the_model_samples(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    for do_sample in ({}, {"do_sample": True}, {"do_sample": False}):
        config = load_model_config(write(tmp_path, generation=values | do_sample))
        assert config.generation.given == values


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        ({}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 20}),
        ({"top_k": None, "min_p": 0.05}, {"temperature": 0.6, "min_p": 0.05}),
    ],
)
def test_generation_defaults_can_be_replaced_and_removed(
    tmp_path: Path, overrides: dict[str, Any], given: dict[str, Any]
) -> None:
    folder = write(tmp_path, generation={"temperature": 0.6, "top_k": 20})
    assert load_model_config(folder, of_generation=overrides).generation.given == given


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"temprature": 1}, "unknown: temprature; known: temperature, "),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_other_generation_defaults_are_checked(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--override-generation-config: .*{message}"):
        load_model_config(write(tmp_path), of_generation=overrides)


def test_generation_settings_that_cannot_be_honoured_are_listed() -> None:
    values = {
        "temperature": 1, "do_sample": False, "repetition_penalty": 1.05, "num_beams": 4,
        "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "bad_words_ids": [[3]],
        "eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 1, "use_cache": True,
        "output_attentions": True, "transformers_version": "5.0.0", "_from_model_config": True,
        "guidance_scale": None, "of_the_future": "x",
    }  # fmt: skip
    defaults = read_generation_defaults(Settings(Path("g.json"), values))
    assert defaults.ignored == (
        "bad_words_ids = [[3]]",
        "do_sample = False",
        "num_beams = 4",
        "of_the_future = x",
    )
    assert defaults.given == {"temperature": 1.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ({"top_p": 1.5}, "top_p=1.5 is out of range"),
        ({"top_k": "all"}, 'top_k = "all" cannot be read'),
        ({"eos_token_id": [1.5]}, "eos_token_id"),
    ],
)
def test_generation_values_out_of_range_name_the_file(
    tmp_path: Path, values: dict, words: str
) -> None:
    with pytest.raises(ModelFileError, match=words) as error:
        load_model_config(write(tmp_path, generation=values))
    assert "generation_config.json" in str(error.value)


def test_code_that_a_config_points_to_is_not_looked_at(tmp_path: Path) -> None:
    foreign = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    assert load_model_config(write(tmp_path, **foreign)).architecture == "Qwen3ForCausalLM"


def test_a_folder_without_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
