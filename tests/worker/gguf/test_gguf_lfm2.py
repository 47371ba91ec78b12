"""LFM2 in GGUF files, written as llama.cpp's converter does, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.dry_run import dry_run
from nanocore.worker.loading.gguf.architectures import gguf_tensors
from nanocore.worker.loading.gguf.gguf_config import config_settings
from nanocore.worker.models import load_model_config
from nanocore.worker.models.lfm2 import Lfm2Config
from tests.model_families import BUILDERS, exact_model
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker.configs import make_worker_config
from tests.worker.gguf.test_gguf_models import greedy
from tests.worker.running import model_groups, run_script, write_script

ENDS = {
    "model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}  # fmt: skip
INSIDE = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
PROMPTS = [[3 + 7 * i % 300 for i in range(40)], [200 - i for i in range(9)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers conv, attention, conv; five taps, and a head that is the embedding."""
    return BUILDERS["lfm2_indexed"](tmp_path_factory.mktemp("lfm2"))


def begin_file(path: Path, config: Any, architecture: str = "lfm2") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    types = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    return writer


def end_file(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_lfm2(path: Path, model: Any, quantized: gguf.GGMLQuantizationType | None = None) -> None:
    """quantized: of matrices but the embedding; the model gets what they stand for."""
    config = model.config
    is_sparse = config.model_type == "lfm2_moe"
    writer = begin_file(path, config, "lfm2moe" if is_sparse else "lfm2")
    if is_sparse:
        add_experts(writer, config)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        module = name.removesuffix(".weight")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        values = parameter.detach().numpy()
        if rest == "feed_forward.experts.gate_up_proj":
            for half, one in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{half}_exps.weight", one.copy())
        elif module in ENDS or rest in INSIDE:
            theirs = ENDS.get(module) or f"blk.{layer}.{INSIDE[rest]}"
            is_taps, kind = rest == "conv.conv", "bias" if rest.endswith("_bias") else "weight"
            values = values.squeeze(1) if is_taps else values
            if quantized is None or values.ndim < 2 or is_taps or module in ENDS:
                writer.add_tensor(f"{theirs}.{kind}", values)
                continue
            blocks = gguf.quants.quantize(values, quantized)
            writer.add_tensor(f"{theirs}.{kind}", blocks, raw_dtype=quantized)
            parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, quantized)))
        else:
            assert "inv_freq" in name, name
    end_file(writer)


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


@pytest.mark.parametrize(
    ("quantized", "backend", "tp_size"),
    [
        (None, "torch", 1),
        (None, "cpu", 2),
        (gguf.GGMLQuantizationType.Q8_0, "torch", 1),
    ],
    ids=str,
)
def test_a_file_says_what_the_model_says_in_transformers(
    folder: Path,
    tmp_path: Path,
    quantized: gguf.GGMLQuantizationType | None,
    backend: str,
    tp_size: int,
) -> None:
    write_lfm2(path := tmp_path / "model.gguf", model := exact_model(folder), quantized)
    compare(path, model, tp_size, backend)


def compare(path: Path, model: Any, tp_size: int, backend: str) -> None:
    outputs = [greedy(model, prompt) for prompt in PROMPTS]
    script = write_script(PROMPTS, outputs, kv_groups=model_groups(path))
    for sample in run_script(path, script, tp_size, backend=backend):
        context = PROMPTS[sample.request] + outputs[sample.request][: sample.index]
        with torch.no_grad():
            expected = model(torch.tensor([context])).logits[0, -1]
        torch.testing.assert_close(sample.logits_V, expected, rtol=1e-4, atol=1e-3)


def test_settings_are_those_of_config_json(folder: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", exact_model(folder)
    write_lfm2(path, model)
    ours, theirs = load_model_config(path), load_model_config(folder)
    for config in (ours, theirs):
        assert isinstance(config, Lfm2Config)
        assert config.conv_layers == {0, 2}
        assert config.num_taps == 5
        assert config.tie_word_embeddings
    assert (ours.attention, ours.mlp, ours.norm_eps) == (theirs.attention, theirs.mlp, 1e-5)
    dry_run(make_worker_config(folder=str(path), load_format="auto", attention_backend="cpu"))


def test_kv_heads_are_given_by_layer(folder: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "lfm2")
    for name in ("block_count", "embedding_length", "feed_forward_length", "context_length"):
        writer.add_uint32(f"lfm2.{name}", 2)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 2), np.float32))
    end_file(writer)
    with pytest.raises(ModelFileError, match=r"attention.head_count_kv = 2 cannot be read"):
        config_settings(path)


def test_names_and_settings_of_experts(folder: Path, tmp_path: Path) -> None:
    config = exact_model(folder).config
    writer = begin_file(path := tmp_path / "model.gguf", config, "lfm2moe")
    config.num_experts, config.num_experts_per_tok = 4, 2
    config.moe_intermediate_size, config.num_dense_layers = 32, 1
    add_experts(writer, config)
    writer.add_tensor("token_embd.weight", np.zeros((384, 64), np.float32))
    writer.add_tensor("blk.1.ffn_gate_inp.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("blk.1.exp_probs_b.bias", np.zeros(4, np.float32))
    writer.add_tensor("blk.1.ffn_down_exps.weight", np.zeros((4, 64, 32), np.float32))
    end_file(writer)
    values = config_settings(path).values
    assert values["architectures"] == ["Lfm2MoeForCausalLM"]
    assert values["layer_types"] == ["conv", "full_attention", "conv"]
    expected = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True,
        "num_key_value_heads": 2, "norm_eps": pytest.approx(1e-5), "conv_L_cache": 5,
    }  # fmt: skip
    assert expected == {name: values[name] for name in expected}
    assert [(tensor.name, tensor.shape) for tensor in gguf_tensors(path)] == [
        ("model.embed_tokens.weight", (384, 64)),
        ("model.layers.1.mlp.gate.weight", (4, 64)),
        ("model.layers.1.feed_forward.expert_bias", (4,)),
        *((f"model.layers.1.mlp.experts.{i}.down_proj.weight", (64, 32)) for i in range(4)),
    ]


@pytest.mark.parametrize(("backend", "tp_size"), [("torch", 1), ("cpu", 2)])
def test_experts_say_what_they_say_in_transformers(
    tmp_path: Path, backend: str, tp_size: int
) -> None:
    folder = BUILDERS["lfm2_moe"](tmp_path / "folder")
    model = exact_model(folder, routed_scaling_factor=1.0)
    write_lfm2(path := tmp_path / "model.gguf", model)
    compare(path, model, tp_size, backend)
