"""Writes a Qwen3 folder as a GGUF file in bf16 for llama.cpp; needs `pip install gguf`.

llama.cpp's own converter wants a tokenizer, which the benchmarks' models do not have. This file's
vocabulary is one of placeholders: requests bring token ids, and nobody reads the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from safetensors import safe_open


def write_gguf(model: Path, out: Path) -> None:
    """Write one file.

    Raises:
        ValueError: the model is no Qwen3, or has a tensor that llama.cpp does not know.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"model of type {config['model_type']}: only qwen3 is written as GGUF")
    writer = gguf.GGUFWriter(out, "qwen3")
    _add_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    _add_tensors(writer, model, config["num_hidden_layers"])
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


def _add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level BPE vocabulary without a merge that any text could reach."""
    tokens = [f"<{token_id}>" for token_id in range(vocab_size)]
    tokens[0] = "Ċ"  # llama.cpp looks for the line feed
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["<0 >"])  # an empty list cannot be written


def _add_tensors(writer: gguf.GGUFWriter, model: Path, num_layers: int) -> None:
    """All tensors by llama.cpp's names; vectors stay float32, as its own converter leaves them."""
    types = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                gguf_name = names.get_name(name, try_suffixes=(".weight",))
                if gguf_name is None:
                    raise ValueError(f"{path.name}: {name} has no name in llama.cpp")
                values = tensors.get_tensor(name).to(torch.float32).numpy()
                kind = types.BF16 if values.ndim > 1 else types.F32
                writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
