"""Values of config.json: ranges, damage, and what transformers makes of the same files."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanocore.kernels.torch.linear import gated
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.config_json import MAX_EXPERTS, MAX_LAYERS
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.rotary import inverse_frequencies
from nanocore.worker.loading.checked_model import as_stored
from nanocore.worker.models import build_model, load_model_config, read_model_config
from nanocore.worker.placement import Placement
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
from tests.worker.test_model_config import EXPERTS, parse, write

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HUGE = 10**12
META = torch.device("meta")

OUT_OF_RANGE: list[tuple[str, str, list[Any]]] = [
    ("Llama", "rms_norm_eps", [0, 0.0, 5e-324, -1e-6, 1.5, 1e30, HUGE]),
    ("Llama", "rope_theta", [0, 1, -10_000.0, 0.5, 1e30, 10**400]),
    ("Gemma3", "rope_local_base_freq", [0, -1.0, 1e30]),
    ("Phi3", "partial_rotary_factor", [0, -0.5, 1.5, 1e30]),
    ("Gemma2", "attn_logit_softcapping", [0, 5e-324, -50.0, 1e30]),
    ("Gemma3", "final_logit_softcapping", [0.0, -1, 1e30]),
    ("Gemma2", "query_pre_attn_scalar", [0, -256, HUGE, 1.5, True]),
    ("Gemma2", "sliding_window", [0, -1, HUGE, 4.5]),
    ("Mistral", "sliding_window", [0, -1, HUGE, "4096"]),
    ("Gemma3", "sliding_window_pattern", [0, -1]),
    ("Gemma", "hidden_activation", ["gelu", "relu", 1]),
    ("SeedOss", "attention_out_bias", [1, "yes"]),
    ("Llama", "head_dim", [0, -8, HUGE, 10**400, 16.5]),
    ("Llama", "hidden_size", [0, -64, HUGE, 10**400, "64", True, [64]]),
    ("Llama", "vocab_size", [0, -1, HUGE, 10**400]),
    ("Llama", "intermediate_size", [0, -1, HUGE]),
    ("Llama", "num_attention_heads", [0, -1, HUGE]),
    ("Llama", "num_key_value_heads", [0, -1, HUGE]),
    ("Llama", "num_hidden_layers", [0, -1, MAX_LAYERS + 1, 10**9, 10**400]),
    ("Llama", "max_position_embeddings", [0, -1, HUGE]),
    ("Qwen3Moe", "num_experts", [0, -1, MAX_EXPERTS, 10**9]),
    ("Qwen3Moe", "num_experts_per_tok", [0, -1, 9, 10**9]),
    ("Qwen3Moe", "moe_intermediate_size", [0, -1, HUGE]),
    ("Qwen2Moe", "shared_expert_intermediate_size", [0, -1, HUGE]),
    ("Qwen3Moe", "decoder_sparse_step", [0, -1]),
    ("Qwen3Moe", "mlp_only_layers", [3, ["x"], [1.5], {}]),
    ("Qwen3Moe", "norm_topk_prob", [1, "yes"]),
    ("Lfm2Moe", "num_dense_layers", [-1, MAX_LAYERS + 1, HUGE, 1.5, "2"]),
    ("Lfm2Moe", "routed_scaling_factor", [0, -1, 1e30, "2"]),
    ("Lfm2Moe", "use_expert_bias", [1, "yes"]),
    ("Lfm2Moe", "norm_topk_prob", [1, "yes"]),
    ("Lfm2Moe", "num_experts_per_tok", [0, 9]),
    ("Llama", "is_causal", [False, 0]),
    ("Llama", "tie_word_embeddings", [1, "true"]),
    ("Llama", "architectures", ["LlamaForCausalLM", [1], {}]),
    ("Llama", "hidden_act", [1, ["silu"], {}]),
    ("Llama", "torch_dtype", [1, ["float32"]]),
    ("Llama", "eos_token_id", [-1, 100, HUGE, 10**400, True, 2.0, "2", [2, -1], [2, 100], [2, "x"],
                               [2, None], [[2]], {"id": 2}, list(range(100)) * 20]),
]  # fmt: skip
ROPE_OUT_OF_RANGE: list[tuple[dict[str, Any], str, list[Any]]] = [
    ({"rope_type": "linear"}, "factor", [0, 0.5, -2, 1e30, True, "2"]),
    ({"rope_type": "dynamic"}, "factor", [0, -2, 1e30]),
    (YARN, "factor", [0, -2, 1e30, 10**400]),
    (YARN, "original_max_position_embeddings", [0, -1, HUGE, 1.5]),
    (YARN, "beta_fast", [-1, 1e30, 5e-324]),
    (YARN, "beta_slow", [-1, 1e30, 5e-324]),
    (YARN, "attention_factor", [0, -1, 1e30]),
    (YARN, "mscale", [-1, 1e30]),
    (YARN, "mscale_all_dim", [-1, 1e30]),
    (YARN, "truncate", [1]),
    (YARN, "rope_theta", [0, 1, -1, 1e30]),
    (YARN, "partial_rotary_factor", [0, -1, 2]),
    ({"rope_type": "ntk"}, "factor", [0, 0.5, -2, 1e30, 10**400]),
    (
        LONGROPE,
        "short_factor",
        [
            [0.0] * 8,
            [1.0] * 7,
            [1.0] * 7 + [1e30],
            [10**400] * 8,
            [1.0] * 7 + ["1"],
            [[1.0]] * 8,
            1.0,
            "1",
            {},
        ],
    ),
    (LONGROPE, "long_factor", [[-1.0] * 8, [1.0] * 9, [], [1.0] * 7 + [None], [5e-324] * 8]),
    (LONGROPE, "factor", [0, 0.5, 1e30]),
    (LONGROPE, "attention_factor", [0, -1, 1e30]),
    (LONGROPE, "original_max_position_embeddings", [0, 1, -1, HUGE]),
    (LLAMA3, "low_freq_factor", [0, -1, 5.0, 1e30, 5e-324]),
    (LLAMA3, "high_freq_factor", [0, -1, 1.0, 1e30]),
]


@pytest.mark.parametrize(("family", "key", "values"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(family: str, key: str, values: list) -> None:
    for value in values:
        with pytest.raises(ModelFileError) as error:
            parse(family, **{key: value})
        assert str(error.value).startswith(f"config.json: {key} = "), value


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("rope", "key", "values"), ROPE_OUT_OF_RANGE)
def test_a_rotary_value_out_of_range_is_refused_by_name(
    name: str, rope: dict, key: str, values: list
) -> None:
    for value in values:
        with pytest.raises(ModelFileError) as error:
            parse("Llama", **{name: rope | {key: value}})
        other = "high_freq_factor" if key == "low_freq_factor" else key
        assert str(error.value).startswith(
            (f"config.json: {name}.{key} = ", f"config.json: {name}.{other} = ")
        ), value


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"rms_norm_eps": 1e-12}),
        ("Llama", {"rope_theta": 5e10}),  # a context of four million
        ("Llama", {"num_hidden_layers": MAX_LAYERS}),
        ("Qwen3Moe", {"num_experts": 512, "num_hidden_layers": 94}),
        ("Llama", {"eos_token_id": [0, 99]}),
        ("Llama", {"rope_scaling": LLAMA3 | {"factor": 32}}),
        ("Mistral", {"sliding_window": 2**31 - 1}),
    ],
)
def test_what_real_models_have_is_in_range(family: str, changes: dict) -> None:
    parse(family, **changes)


def test_an_end_that_the_model_cannot_say_is_refused_in_either_file(tmp_path: Path) -> None:
    for ids in ([1, 100], 10**12, [-5]):
        with pytest.raises(
            ModelFileError, match=r"generation_config.json: eos_token_id = .*100 to"
        ):
            load_model_config(write(tmp_path, generation={"eos_token_id": ids}, eos_token_id=3))
    folder = write(tmp_path, generation={"eos_token_id": [7, 5, 7]}, eos_token_id=10**12)
    assert load_model_config(folder).eos_token_ids == (7, 5)  # the other file's is not used
    with pytest.raises(ModelFileError, match=r"config.json: eos_token_id = true cannot be read"):
        load_model_config(write(tmp_path, generation={"eos_token_id": 7}, eos_token_id=True))


def test_a_familys_own_end_is_left_out_of_a_vocabulary_that_lacks_it() -> None:
    assert parse("Phi3").eos_token_ids == ()
    assert parse("Phi3", vocab_size=40_000).eos_token_ids == (32000,)


def test_every_activation_of_transformers_is_computed_or_refused() -> None:
    from transformers.activations import ACT2CLS, ACT2FN

    x = torch.linspace(-8, 8, 1001)
    served = set()
    for name in ACT2CLS:
        try:
            activation = parse("Llama", hidden_act=name).mlp.activation
        except ModelFileError:
            continue
        served.add(name)
        ours = gated(torch.cat((x, torch.ones_like(x))), activation)
        torch.testing.assert_close(ours, ACT2FN[name](x), atol=2e-6, rtol=1e-5)
    assert {"silu", "swish", "gelu_pytorch_tanh", "gelu_new"} <= served
    assert "gelu" not in served  # the exact one


def bad_files() -> dict[str, bytes]:
    """config.json as a damaged disk or a stranger would have it."""
    base = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
    deep = b'{"rope_scaling":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return {
        "deep": deep,
        "deep enough": b'{"architectures":' + b"[" * 900 + b"]" * 900 + b"}",
        "a digit too many": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
        "out of range": base.replace(b"}", b', "rope_theta": 1e999}'),
        "NaN": base.replace(b"}", b', "rms_norm_eps": NaN}'),
        "Infinity": base.replace(b"}", b', "rms_norm_eps": -Infinity}'),
        "half behind a BOM": b"\xef\xbb\xbf" + base[:-3],
        "UTF-16": base.decode().encode("utf-16"),
        "no UTF-8": b'{"architectures": ["\xff\xfe"]}',
        "no UTF-8 in a key": b'{"\xff": 1}',
        "a lone surrogate": b'{"architectures": ["\\ud800"]}',
        "a list": b"[]",
        "nothing": b"",
        "half": base[:-3],
        "10 MB of one name": b'{"architectures": ["' + b"x" * 10_000_000 + b'"]}',
    }


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", bad_files())
def test_a_file_that_is_damaged_is_named(tmp_path: Path, kind: str, file: str) -> None:
    content = bad_files()[kind]
    write(tmp_path, generation={})
    (tmp_path / file).write_bytes(content)
    if file == "generation_config.json" and kind == "deep enough":
        load_model_config(tmp_path)  # a setting of another program
        return
    with pytest.raises(ModelFileError) as error:
        load_model_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / file}: ")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_file_of_no_end_is_not_read_to_it(tmp_path: Path, file: str) -> None:
    with (write(tmp_path) / file).open("ab") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(ModelFileError, match="1099511627776 bytes: at most "):
        as_stored(load_model_config(tmp_path), tmp_path, str)


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFileError, match=r"config\.json is not a file"):
        load_model_config(tmp_path)


def test_a_link_to_nothing_is_no_missing_file(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").symlink_to("../blobs/1")
    with pytest.raises(ModelFileError, match=r"generation_config\.json is missing"):
        load_model_config(tmp_path)


def test_what_cannot_be_honoured_is_quoted_in_part(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, generation={"of_the_future": "x" * 10**6}))
    (ignored,) = config.generation.ignored
    assert len(ignored) < 1000


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "max_position_embeddings",
                                 "vocab_size", "hidden_size", "num_attention_heads"])  # fmt: skip
def test_absurd_sizes_take_no_memory_to_be_read(key: str) -> None:
    tracemalloc.start()
    with suppress(ModelFileError):  # of some the memory, or the files, will have to judge
        parse("Qwen3Moe", **EXPERTS | {key: 10**9})
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20


def read_folder(folder: Path) -> ModelConfig:
    return read_model_config(
        Settings.read(folder / "config.json"), Settings.read(folder / "generation_config.json")
    )


def load(folder: Path) -> Any:
    return reference_model(folder, dtype=torch.float32)


def first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def rotary_of(decoder: Any) -> Any:
    return getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_layer_is_read_as_transformers_builds_it(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    config, model = read_folder(folder), load(folder)
    ours, own = build_model(config, Placement(torch.float32, META)), config.attention
    text_config, decoder = model.config.get_text_config(), text_model(model)
    assert config.architecture == type(model).__name__
    assert config.longest_model_len == MAX_MODEL_LEN
    assert config.eos_token_ids == (EOS,)
    for i, layer in enumerate(first_of(decoder, "layers", "h")):
        mlp = first_of(layer, "mlp", "feed_forward")
        is_sparse = hasattr(mlp, "experts")
        assert is_sparse == (config.moe is not None and i in config.moe.sparse_layers)
        if not is_sparse:
            down_proj = first_of(mlp, "down_proj", "c_proj", "w2")
            assert (down_proj.bias is not None) == config.mlp.bias
            assert down_proj.weight.numel() == config.hidden_size * config.mlp.inner_size
        with_states = getattr(config, "conv_layers", getattr(config, "linear_layers", ()))
        if i in with_states:
            assert hasattr(layer, "conv") or hasattr(layer, "linear_attn")
            continue
        attention = first_of(layer, "self_attn", "attn")
        assert attention.head_dim == config.attention.head_dim
        assert attention.scaling == own.scale
        window = getattr(attention, "sliding_window", getattr(text_config, "sliding_window", 0))
        assert (window or 0) == own.window(i)
        rotates = getattr(attention, "use_rope", rotary_of(decoder) is not None)
        assert bool(rotates) == (own.rotation(i) != "none")
        qkv = first_of(attention, "q_proj", "qkv_proj", "c_attn")
        assert (qkv.bias is not None) == own.bias
        o_proj = first_of(attention, "o_proj", "c_proj", "out_proj")
        assert (o_proj.bias is not None) == own.o_proj_bias
    residual = getattr(text_config, "residual_multiplier", 1.0)  # divides the whole stream
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    assert ours.embedding_factor == getattr(text_config, "embedding_multiplier", scale) / residual
    eps = first_of(text_config, "rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    assert config.norm_eps == eps / residual**2
    assert ours.hidden_factor == getattr(text_config, "logits_scaling", 1.0)
    assert config.tie_word_embeddings == (model.lm_head.weight is embedding.weight)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_rotation_is_read_as_transformers_builds_it(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    config, rotary = read_folder(folder), rotary_of(text_model(load(folder)))
    assert bool(config.attention.rope) == (rotary is not None)
    for layer_type, rope in config.attention.rope.items():
        theirs = getattr(rotary, f"{layer_type}_inv_freq", getattr(rotary, "inv_freq", None))
        own_length = MAX_MODEL_LEN // 8  # up to which dynamic NTK is plain, and LongRoPE short
        assert torch.equal(inverse_frequencies(rope, own_length), theirs)


@pytest.mark.parametrize(
    "name", [name for name in SPECS if not name.startswith(("gemma3", "gpt2"))]
)
def test_the_old_schema_of_rotary_settings_reads_the_same(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    new = read_folder(folder)

    def to_old(config: dict[str, Any]) -> None:
        config = config.get("text_config", config)
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if rope == {"type": "default"} else rope

    assert read_folder(rewrite_config(folder, to_old)) == new


def test_gemma3s_old_schema_reads_the_same(tmp_path: Path) -> None:
    folder = BUILDERS["gemma3"](tmp_path)
    new = read_folder(folder)

    def to_old(config: dict[str, Any]) -> None:
        ropes = config.pop("rope_parameters")
        config["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
        config["rope_theta"] = ropes[FULL].pop("rope_theta")
        config["rope_scaling"] = ropes[FULL]

    assert read_folder(rewrite_config(folder, to_old)) == new


def test_the_experts_of_a_saved_model_have_tensors_of_their_own(tmp_path: Path) -> None:
    """transformers fuses them in memory and takes them apart when it saves."""
    from safetensors import safe_open

    folder = BUILDERS["qwen3_moe"](tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shape = file.get_slice("model.layers.0.mlp.experts.7.down_proj.weight").get_shape()
    moe = read_folder(folder).moe
    assert moe is not None
    assert shape == [64, moe.inner_size]
    assert "num_local_experts" in json.loads((folder / "config.json").read_text())
