"""Experts that a checkpoint has in few bits say what their dequantized floats say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.kernels.cpu.library import find_library
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from tests.campaign import in_campaign
from tests.worker.dequantized import dequantized
from tests.worker.running import Sample, run_script, write_script

pytestmark = pytest.mark.skipif(
    find_library() is None, reason="nanocore was installed without a C++ compiler"
)

GROUP = 32
HIDDEN, INNER, NUM_EXPERTS, NUM_LAYERS, VOCAB = 64, 64, 6, 2, 96
PROMPTS = [[1 + 7 * i % 90 for i in range(length)] for length in (3, 18, 40)]
OUTPUTS = [[5, 6], [7, 8], [9, 10]]
COMMON = {
    "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "eos_token_id": 0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
QWEN3 = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": INNER, "intermediate_size": INNER, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": NUM_EXPERTS,
    "intermediate_size": INNER,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}}},
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def words(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)


def stored(kind: str, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    num_out, num_in = shape
    groups, scale = num_in // GROUP, 0.2 / num_in**0.5
    scales = scale * (0.5 + torch.rand(groups, num_out, generator=generator))
    if kind == "awq":
        return {
            "qweight": words(generator, num_in, num_out // 8),
            "qzeros": words(generator, groups, num_out // 8),
            "scales": scales.half(),
        }
    if kind == "gptq":
        return {
            "qweight": words(generator, num_in // 8, num_out),
            "qzeros": words(generator, groups, num_out // 8) & 0x77777777,
            "scales": scales.half(),
            "g_idx": (torch.arange(num_in) // GROUP).int(),
        }
    if kind == "packed":
        return {
            "weight_packed": words(generator, num_out, num_in // 8),
            "weight_scale": scales.t().contiguous().bfloat16(),
            "weight_shape": torch.tensor(shape),
        }
    values = torch.randn(shape, generator=generator) * 50
    return {
        "weight": values.to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((1, 1), 0.02 / num_in**0.5),
    }


def floats(folder: Path, config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a model, by the names that its architecture has for them here."""
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    model = build_model(load_model_config(folder), Placement(torch.float32, torch.device("meta")))
    tensors = {}
    for name, entry in model.entries().items():
        noise = torch.randn(entry.shape, generator=generator)
        is_matrix = noise.ndim == 2
        tensors[name] = noise / entry.shape[-1] ** 0.5 if is_matrix else 1 + 0.1 * noise
    return tensors


def spelled(name: str, config: Mapping[str, Any]) -> str:
    if config["architectures"] == MIXTRAL["architectures"]:
        name = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(ours, theirs)
    return name


def write_pair(
    folder: Path, config: Mapping[str, Any], quantization: Mapping[str, Any], kind: str
) -> tuple[Path, Path]:
    """The same model in floats and quantized, but for embedding, head, norms and routers."""
    plain, packed = folder / "floats", folder / "quantized"
    plain.mkdir()
    packed.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in floats(plain, config).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        num_out, num_in = tensor.shape
        parts = stored(kind, (num_out, num_in), generator)
        tensors |= {f"{module}.{slot}": value for slot, value in parts.items()}
    meaning = dequantized(tensors, quantization)
    save_file({spelled(k, config): v.contiguous() for k, v in tensors.items()},
              packed / "model.safetensors")  # fmt: skip
    save_file({spelled(k, config): v.float().contiguous() for k, v in meaning.items()},
              plain / "model.safetensors")  # fmt: skip
    said = {**config, "quantization_config": quantization}
    (packed / "config.json").write_text(json.dumps(said))
    return plain, packed


def say(folder: Path, tp_size: int = 1, **how: Any) -> Tensor:
    samples: list[Sample] = run_script(folder, write_script(PROMPTS, OUTPUTS), tp_size, **how)
    samples.sort(key=lambda sample: (sample.request, sample.index))
    return torch.stack([sample.logits_V for sample in samples])


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.parametrize(
    ("config", "quantization", "kind"),
    [
        (QWEN3, AWQ, "awq"),
        (QWEN3, GPTQ, "gptq"),
        (QWEN3, PACKED, "packed"),
        (QWEN3, FP8, "fp8"),
        (MIXTRAL, AWQ, "awq"),
        *in_campaign((MIXTRAL, GPTQ, "gptq"), (MIXTRAL, FP8, "fp8")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_of_a_checkpoint_are_its_dequantized_ones(
    config: dict[str, Any], quantization: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    plain, packed = write_pair(tmp_path, config, quantization, kind)
    expected = say(plain, backend="torch")
    assert float((say(packed, backend="torch") - expected).abs().max()) < 1e-4
    # E4M3 becomes int8 on a CPU.
    most = 0.1 if kind == "fp8" else 1e-5
    for tp_size in (1, 2):
        assert error(say(packed, tp_size, keeps_activations=True), expected) < most
    assert error(say(packed), expected) < 0.1


def test_an_expert_unlike_the_others_is_refused(tmp_path: Path) -> None:
    except_one = {**AWQ, "modules_to_not_convert": ["experts.3.up_proj"]}
    plain, packed = write_pair(tmp_path, QWEN3, AWQ, "awq")
    name = "model.layers.1.mlp.experts.3.up_proj"
    tensors = load_file(packed / "model.safetensors")
    for slot in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{slot}"]
    tensors[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = except_one
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="experts of a layer are stored in different ways"):
        say(packed)


def write_gguf(path: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Path:
    """A file of Qwen3-MoE by llama.cpp's package. kinds: of expert tensors, by projection."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {
        "block_count": NUM_LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "context_length": 128, "expert_count": NUM_EXPERTS,
        "expert_used_count": 2, "expert_feed_forward_length": INNER,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.rope.freq_base", 10_000.0)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    }  # fmt: skip
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if ".experts." in module:
            continue
        theirs = ends.get(module)
        if theirs is None:
            layer, _, rest = module.removeprefix("model.layers.").partition(".")
            theirs = f"blk.{layer}.{inside[rest]}"
        writer.add_tensor(f"{theirs}.weight", tensor.float().numpy())
    for layer in range(NUM_LAYERS):
        for projection, kind in kinds.items():
            each = [tensors[f"model.layers.{layer}.mlp.experts.{i}.{projection}.weight"]
                    for i in range(NUM_EXPERTS)]  # fmt: skip
            of_kind = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(torch.stack(each).numpy(), of_kind)
            theirs = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight"
            writer.add_tensor(theirs, blocks, raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "kinds",
    [
        {"gate_proj": "Q4_0", "up_proj": "Q4_0", "down_proj": "Q8_0"},
        {"gate_proj": "F16", "up_proj": "F16", "down_proj": "F16"},
    ],
    ids=lambda kinds: "-".join(kinds.values()),
)
def test_experts_of_a_gguf_file_are_its_dequantized_ones(
    kinds: dict[str, str], tmp_path: Path
) -> None:
    plain = tmp_path / "floats"
    plain.mkdir()
    tensors = floats(plain, QWEN3)
    path = write_gguf(tmp_path / "model.gguf", tensors, kinds)
    for name, tensor in tensors.items():
        if ".experts." in name:
            of_kind = gguf.GGMLQuantizationType[kinds[name.split(".")[-2]]]
            blocks = gguf.quants.quantize(tensor.numpy(), of_kind)
            tensors[name] = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, of_kind)))
    save_file(tensors, plain / "model.safetensors")
    expected = say(plain, backend="torch")
    for tp_size in (1, 2):
        assert error(say(path, tp_size, keeps_activations=True), expected) < 1e-5
    assert error(say(path), expected) < 0.1
