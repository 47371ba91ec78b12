"""Writes a Qwen3 or Qwen3.5 folder as a GGUF file in bf16 for llama.cpp; needs `pip install gguf`.

llama.cpp's own converter wants a tokenizer, which the benchmarks' models do not have. This file's
vocabulary is one of placeholders: requests bring token ids, and nobody reads the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from gguf.quants import quantize
from safetensors import safe_open

_ARCHITECTURES: Final = {
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "qwen3_5_text": ("qwen35", gguf.MODEL_ARCH.QWEN35),
}


def write_gguf(model: Path, out: Path) -> None:
    """Write one file.

    Raises:
        ValueError: the model is neither, or has a tensor that llama.cpp does not know.
    """
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"model of type {kind}: GGUF files are written of {known} only")
    name, architecture = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(out, name)
    _add_sizes(writer, config)
    if kind == "qwen3_5_text":
        _add_hybrid_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    _add_tensors(writer, model, names, kind == "qwen3_5_text")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])


def _add_hybrid_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    num_heads = config["linear_num_value_heads"]
    if num_heads != config["linear_num_key_heads"]:
        raise ValueError(f"linear_num_value_heads {num_heads}: other than linear_num_key_heads")
    rotary_dim = config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(rotary_dim))
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # text has one position: they all are it
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(num_heads)
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * config["linear_value_head_dim"])


def _add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level BPE vocabulary of placeholders; merges cannot be an empty list."""
    tokens = [f"<{token_id}>" for token_id in range(vocab_size)]
    tokens[:4] = ["Ċ", "a", "b", "ab"]  # llama.cpp looks for the line feed
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["a b"])


def _add_tensors(writer: gguf.GGUFWriter, model: Path, names: Any, is_hybrid: bool) -> None:
    """All tensors by llama.cpp's names; vectors stay float32, as its own converter leaves them."""
    types = gguf.GGMLQuantizationType
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name).to(torch.float32)
                known = name.replace("dt_bias", "dt_proj.bias") if is_hybrid else name
                gguf_name = names.get_name(known, try_suffixes=(".weight", ".bias"))
                if gguf_name is None:
                    raise ValueError(f"{path.name}: {name} has no name in llama.cpp")
                values = (_hybrid_values(name, tensor) if is_hybrid else tensor).numpy()
                is_matrix = values.ndim > 1 and "conv1d" not in name
                kind = types.BF16 if is_matrix else types.F32
                writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)


def _hybrid_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's converter stores of a Qwen3.5's tensor."""
    if name.endswith("A_log"):
        return -tensor.exp()
    if "conv1d" in name:
        return tensor.squeeze(1)
    return tensor + 1 if name.endswith("norm.weight") and "linear_attn" not in name else tensor
