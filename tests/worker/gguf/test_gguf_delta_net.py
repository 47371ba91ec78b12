"""Qwen3-Next and Qwen3.5 in GGUF files, with the same tensors, bit by bit, as llama.cpp's converter
makes of these models (llama-cpp-python 0.3.36). llama.cpp says the same of them: greedy tokens are
equal, and logits of up to 24 differ by up to 4e-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.dry_run import dry_run
from nanocore.worker.loading.gguf.architectures import gguf_tensors
from nanocore.worker.loading.gguf.gguf_config import config_settings
from nanocore.worker.loading.gguf.gguf_format import GgufFormat
from nanocore.worker.loading.gguf.tokenizer_files import PRE_TOKENIZERS
from nanocore.worker.loading.lora import MergedFormat, read_adapter
from nanocore.worker.loading.weights import Projection, in_tiles
from nanocore.worker.models import load_model_config
from nanocore.worker.models.qwen_hybrid import HybridConfig
from tests.model_families import exact_model, make_tiny
from tests.worker.configs import make_worker_config
from tests.worker.gguf.test_gguf_lfm2 import end_file
from tests.worker.gguf.test_gguf_models import CHECKPOINTS, greedy
from tests.worker.lora_adapters import write_adapter
from tests.worker.running import Sample, model_groups, run_script, write_script

ARCHITECTURES: Final = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
}  # fmt: skip
ENDS: Final = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
INSIDE: Final = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
PROMPTS: Final = [[3 + 7 * i % 300 for i in range(40)], [200 - i for i in range(9)]]
THIRDS: Final = {"linear_num_value_heads": 6}
"""Three value heads for each key head."""


def write_file(
    path: Path, model: Any, num_nextn: int = 0, quantized: Any = None, **changes: Any
) -> Path:
    """Write a model as llama.cpp's converter does.

    num_nextn: layers that guess further tokens, after the model's. quantized: a type of matrices
    but the embedding and the head; the model gets what they stand for. changes: of settings, None
    for none.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (settings(config, num_nextn) | changes).items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            kinds[type(value)](key, value)
    if quantized is not None:
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter):
                blocks = gguf.quants.quantize(parameter.detach().numpy(), quantized)
                values = gguf.quants.dequantize(blocks, quantized)
                parameter.data.copy_(torch.from_numpy(values))
    for name, theirs, tensor in tensors_of(model, num_nextn):
        values = np.ascontiguousarray(tensor.detach().numpy())
        if quantized is None or not is_matrix(name, tensor):
            writer.add_tensor(theirs, values)
        else:
            blocks = gguf.quants.quantize(values, quantized)
            writer.add_tensor(theirs, blocks, raw_dtype=quantized)
    end_file(writer)
    return path


def is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not any(one in name for one in ("conv1d", *ENDS))


def settings(config: Any, num_nextn: int) -> dict[str, Any]:
    """Without those that llama.cpp has defaults for where the model's are these."""
    rope = config.rope_parameters
    values = {
        "block_count": config.num_hidden_layers + num_nextn, "context_length": 1024,
        "embedding_length": config.hidden_size, "vocab_size": config.vocab_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__key_length": config.head_dim, "attention__value_length": config.head_dim,
        "attention__layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope__freq_base": rope["rope_theta"], "rope__dimension_sections": [11, 11, 10, 0],
        "rope__dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "ssm__conv_kernel": config.linear_conv_kernel_dim,
        "ssm__state_size": config.linear_key_head_dim,
        "ssm__group_count": config.linear_num_key_heads,
        "ssm__time_step_rank": config.linear_num_value_heads,
        "ssm__inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }  # fmt: skip
    if num_nextn:
        values["nextn_predict_layers"] = num_nextn
    flags = [kind == "linear_attention" for kind in config.layer_types]
    if flags == [(i + 1) % 2 != 0 for i in range(len(flags))]:
        values["full_attention_interval"] = 2
    else:
        values["attention__recurrent_layers"] = flags + [False] * num_nextn
    if getattr(config, "num_experts", 0):
        values |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    else:
        values["feed_forward_length"] = config.intermediate_size
    return values


def tensors_of(model: Any, num_nextn: int) -> Iterator[tuple[str, str, Tensor]]:
    """Names here and there, and what is stored."""
    config = model.config
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        for own, tensor in stored(config, rest, parameter.detach()):
            if module in ENDS:
                yield name, f"{ENDS[module]}.weight", tensor
                continue
            of_heads = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
            theirs = of_heads.get(own) or f"{INSIDE[own]}.weight"
            yield name, f"blk.{layer}.{theirs}", tensor
            if int(layer) == config.layer_types.index("full_attention"):
                for i in range(num_nextn):  # with weights that the model would not be itself with
                    yield name, f"blk.{config.num_hidden_layers + i}.{theirs}", tensor + 1
    if num_nextn:
        size, first = config.hidden_size, config.num_hidden_layers
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield name, f"blk.{first}.nextn.{name}.weight", torch.ones(size)
        yield "eh_proj", f"blk.{first}.nextn.eh_proj.weight", torch.ones(size, 2 * size)


def stored(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensor as the converter stores it, by names of parts where it is cut."""
    num_keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    per_key, keys = config.linear_num_value_heads // num_keys, num_keys * config.linear_key_head_dim
    is_tiled = config.model_type != "qwen3_next"

    def heads(values: Tensor, size: int) -> Tensor:
        grouped = values.unflatten(0, (num_keys, per_key, size))
        return grouped.transpose(0, 1).flatten(0, 2) if is_tiled else values

    part = name.removeprefix("linear_attn.")
    if name.endswith("experts.gate_up_proj"):
        for half, one in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"mlp.experts.{half}_proj", one
    elif part == "in_proj_qkvz":
        sizes = [config.linear_key_head_dim] * 2 + [per_key * dim] * 2
        q, k, v, z = tensor.unflatten(0, (num_keys, -1)).split(sizes, dim=1)
        yield "linear_attn.in_proj_qkv", torch.cat([one.flatten(0, 1) for one in (q, k, v)])
        yield "linear_attn.in_proj_z", z.flatten(0, 1)
    elif part in ("in_proj_qkv", "conv1d"):
        tensor = tensor.squeeze(1)
        yield name, torch.cat([tensor[: 2 * keys], heads(tensor[2 * keys :], dim)])
    elif part == "A_log":
        yield name, -torch.exp(heads(tensor, 1))
    elif part in ("dt_bias", "in_proj_a", "in_proj_b"):
        yield name, heads(tensor, 1)
    elif part == "in_proj_z":
        yield name, heads(tensor, dim)
    elif part == "out_proj":
        yield name, heads(tensor.t(), dim).t()
    else:
        yield name, tensor + 1 if name.endswith("norm") and part == name else tensor


CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen35": ("qwen35", {}),
    "thirds": ("qwen35", THIRDS),
    "qwen35_square": ("qwen35_square", {}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": []}),
    "qwen35_moe": ("qwen35_moe", {}),
}
SAME_ORDER: Final = ("qwen35_square", "qwen3_next")
"""Models whose value heads have the same order in both kinds of files."""


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a model, its GGUF file, and the model."""
    name, changes = CASES[request.param]
    folder = make_tiny(name, tmp_path_factory.mktemp(request.param), **changes)
    model = exact_model(folder)
    return request.param, folder, write_file(folder / "model.gguf", model), model


def said(path: Path, outputs: list[list[int]], tp_size: int, backend: str) -> list[Sample]:
    script = write_script(PROMPTS, outputs, kv_groups=model_groups(path))
    return run_script(path, script, tp_size, backend=backend)


def compare(path: Path, other: Path, model: Any, tp_size: int, backend: str) -> float:
    """Check tokens, and logits against those of another file; returns the largest difference."""
    outputs = [greedy(model, prompt) for prompt in PROMPTS]
    differences = []
    pairs = [said(one, outputs, tp_size, backend) for one in (path, other)]
    for ours, expected in zip(*pairs, strict=True):
        assert ours.token_id == outputs[ours.request][ours.index]
        torch.testing.assert_close(ours.logits_V, expected.logits_V, rtol=1e-4, atol=2e-4)
        differences.append((ours.logits_V - expected.logits_V).abs().max().item())
    return max(differences)


@pytest.mark.parametrize(("backend", "tp_size"), [("torch", 1), ("cpu", 2)])
def test_a_file_says_what_the_checkpoint_says(case: Any, backend: str, tp_size: int) -> None:
    name, folder, path, model = case
    difference = compare(path, folder, model, tp_size, backend)
    if name in SAME_ORDER:
        assert difference == 0


def test_settings_are_those_of_config_json(case: Any) -> None:
    _, folder, path, _ = case
    ours, theirs = load_model_config(path), load_model_config(folder)
    for config in (ours, theirs):
        assert isinstance(config, HybridConfig)
        assert config.is_gguf is (config is ours)
    for field in ("architecture", "attention", "moe", "linear_layers", "num_key_heads", "key_dim"):
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in ("num_value_heads", "value_dim", "num_taps", "tie_word_embeddings", "num_layers"):
        assert getattr(ours, field) == getattr(theirs, field), field
    dry_run(make_worker_config(folder=str(path), load_format="auto", attention_backend="cpu"))


@pytest.fixture(scope="module")
def thirds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen35", tmp_path_factory.mktemp("three"), **THIRDS, intermediate_size=128)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_blocks_are_cut_by_heads(thirds: Path, tmp_path: Path, tp_size: int) -> None:
    model = exact_model(thirds)
    path = write_file(tmp_path / "q8.gguf", model, quantized=gguf.GGMLQuantizationType.Q8_0)
    floats = write_file(tmp_path / "floats.gguf", model)
    compare(path, floats, model, tp_size, "torch")


def test_layers_that_guess_further_tokens_are_left_out(thirds: Path, tmp_path: Path) -> None:
    model = exact_model(thirds)
    plain = write_file(tmp_path / "plain.gguf", model)
    path = write_file(tmp_path / "mtp.gguf", model, num_nextn=2)
    assert config_settings(path).values == config_settings(plain).values
    assert [one.name for one in gguf_tensors(path)] == [one.name for one in gguf_tensors(plain)]
    assert compare(path, plain, model, 1, "torch") == 0


def test_kv_heads_may_be_given_by_layer(thirds: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, exact_model(thirds), attention__head_count_kv=[0, 0, 2, 0, 2])
    assert load_model_config(path).attention.num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm__state_size": None}, r"qwen35\.ssm\.state_size is missing"),
        ({"ssm__conv_kernel": 9}, r"linear_conv_kernel_dim = 9 must be at least 2"),
        ({"ssm__time_step_rank": 0}, r"linear_num_value_heads = 0 must be at least 1"),
        ({"ssm__group_count": 4}, r"linear_num_value_heads = 6 is no multiple of"),
        ({"ssm__v_head_reordered": 1}, "is a setting that is not served"),
        ({"full_attention_interval": 2.5}, "full_attention_interval = 2.5 cannot be read"),
        ({"attention__recurrent_layers": [True, False]}, r"must have 5 entries"),
        ({"attention__recurrent_layers": [True] * 5}, "none of the 5 layers is full_attention"),
        ({"nextn_predict_layers": 5}, "num_hidden_layers = 0 must be at least 1"),
        ({"expert_count": 4}, "is not served for this architecture"),
    ],
)
def test_settings_are_refused(
    thirds: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_file(tmp_path / "model.gguf", exact_model(thirds), **changes)
    with pytest.raises(ModelFileError, match=message):
        load_model_config(path)


def test_experts_have_the_scores_and_weights_that_are_served(tmp_path: Path) -> None:
    model = exact_model(make_tiny("qwen35_moe", tmp_path / "folder"))
    served = {"expert_gating_func": 1, "expert_weights_norm": True, "feed_forward_length": 160}
    config = load_model_config(write_file(tmp_path / "served.gguf", model, **served))
    assert config.moe is not None
    assert config.moe.norm_topk_prob
    for name, value in {"expert_gating_func": 2, "expert_weights_norm": False}.items():
        path = write_file(tmp_path / f"{name}.gguf", model, **{name: value})
        with pytest.raises(ModelFileError, match=f"{name} = (2|false) is not served"):
            load_model_config(path)


def test_ranks_have_a_share_of_each_tile_or_are_told_what_fits() -> None:
    name = "model.layers.0.mlp.down_proj"
    tiled = Projection(name, (256, 256), slice(0, 256), slice(32, 64), 2)
    assert tiled.num_columns == 64
    q8 = GgufFormat(CHECKPOINTS / "qwen3-q8_0.gguf", 64, torch.float32)
    stored_blocks = q8.projection(tiled)
    assert stored_blocks is not None
    rows, columns = stored_blocks.slots["blocks"].index
    assert rows == slice(0, 256)
    assert columns.tolist() == [*range(34, 68), *range(34 + 4 * 34, 68 + 4 * 34)]
    k = GgufFormat(CHECKPOINTS / "llama-q4_k_m.gguf", 64, torch.float32)
    with pytest.raises(ConfigError, match=r"-size 4: the 256 inputs of .*this layer: 1$"):
        k.projection(tiled)
    assert in_tiles(slice(1, 2), 6, 3).tolist() == [1, 3, 5]


def test_an_adapter_is_not_merged_into_heads_of_another_order(thirds: Path, tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf", exact_model(thirds))
    write_adapter(tmp_path / "adapter", {"model.layers.0.linear_attn.out_proj": (64, 192)})
    merged = MergedFormat(
        GgufFormat(path, 64, torch.float32),
        read_adapter(tmp_path / "adapter", lambda name: name),
        torch.float32,
    )
    kept = Projection("model.layers.0.linear_attn.out_proj", (64, 192), slice(0, 64), slice(0, 192))
    with pytest.raises(ModelFileError, match="merge into the model's unquantized checkpoint"):
        merged.projection(kept)


def test_words_have_marks_in_them() -> None:
    pre = PRE_TOKENIZERS["qwen35"]
    assert pre.pattern == PRETOKENIZE_REGEX
    assert pre.is_composed
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str("i\u0307s 12!")] == [
        "i\u0307s", " ", "1", "2", "!",
    ]  # fmt: skip
