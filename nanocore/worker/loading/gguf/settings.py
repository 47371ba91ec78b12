"""What config.json and generation_config.json would say of a GGUF model, made of its settings.

The reader of these files then checks them as it checks any other. Defaults are llama.cpp's, where
its converter leaves something out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.settings import Settings
from nanocore.worker.loading.gguf.architectures import ARCHITECTURES
from nanocore.worker.loading.gguf.files import read_headers
from nanocore.worker.loading.gguf.header import Header
from nanocore.worker.loading.gguf.metadata import Metadata
from nanocore.worker.loading.gguf.rope import rope_settings
from nanocore.worker.loading.gguf.tensors import FLOATS, find_tensor
from nanocore.worker.loading.gguf.vocabulary import Vocabulary, end_token_ids

_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_settings(first: Path) -> Settings:
    """config.json's.

    Raises:
        ModelFileError: the architecture is not served, or a setting is missing or not served.
    """
    headers = read_headers(first)
    metadata = Metadata(headers[0])
    family = ARCHITECTURES[metadata.architecture]
    is_sparse = metadata.has("expert_count") and metadata.size("expert_count") > 0
    class_name = family.sparse_class if is_sparse else family.class_name
    if not class_name:
        raise metadata.error("expert_count", "is not served for this architecture")
    values: dict[str, Any] = {
        "architectures": [class_name],
        **_sizes(metadata, headers),
        **rope_settings(metadata, headers),
        **(_experts(metadata) if is_sparse else {}),
    }
    if (read := _READERS.get(metadata.architecture)) is not None:
        values |= read(metadata, values)
    metadata.expect("attention.causal", True, default=True)
    metadata.expect("nextn_predict_layers", 0, default=0)
    metadata.expect("expert_used_count", 0, default=0, unless=is_sparse)
    metadata.check_all_taken()
    return Settings(f"{first} (settings as config.json has them)", values)


def generation_settings(first: Path) -> Settings:
    """generation_config.json's: what ends a text, and the sampling that the makers recommend.

    Raises:
        ModelFileError: the vocabulary is damaged.
    """
    header = read_headers(first)[0]
    values: dict[str, Any] = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    if "tokenizer.ggml.model" in header.metadata and (ids := end_token_ids(Vocabulary.read(first))):
        values["eos_token_id"] = ids
    return Settings(f"{first} (settings as generation_config.json has them)", values)


def _sizes(metadata: Metadata, headers: list[Header]) -> dict[str, Any]:
    embedding = find_tensor(headers, "token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{metadata.path}: token_embd.weight is missing")
    num_heads, hidden_size = metadata.size("attention.head_count"), embedding.shape[-1]
    if metadata.size("embedding_length") != hidden_size:
        raise metadata.error("embedding_length", f"and token_embd.weight has {hidden_size}")
    head_dim = metadata.size("attention.key_length", hidden_size // max(1, num_heads))
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise metadata.error("attention.value_length", f"is not attention.key_length, {head_dim}")
    rotary_dim = metadata.size("rope.dimension_count", head_dim)
    partial = {"partial_rotary_factor": rotary_dim / head_dim} if head_dim != rotary_dim else {}
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": find_tensor(headers, "output.weight") is None,
        "attention_bias": has_bias(headers, "attn_q") or has_bias(headers, "attn_qkv"),
        "mlp_bias": has_bias(headers, "ffn_up"),
        "dtype": _dtype(headers),
        **partial,
    }


def has_bias(headers: list[Header], projection: str) -> bool:
    """Whether this projection of the first layer, by llama.cpp's name, has a bias."""
    return find_tensor(headers, f"blk.0.{projection}.bias") is not None


def _dtype(headers: list[Header]) -> str:
    """That of most matrices' bytes; of blocks, which have none, bfloat16."""
    num_bytes = Counter[str]()
    for header in headers:
        for info in header.tensors:
            if len(info.shape) > 1:
                num_bytes[info.type.name] += info.num_bytes
    if set(num_bytes) - set(FLOATS):
        return "bfloat16"
    return _DTYPES[max(num_bytes, key=lambda name: num_bytes[name], default="F32")]


def _experts(metadata: Metadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", 1, default=1)  # softmax
    metadata.expect("expert_weights_scale", 1.0, default=1.0)
    intermediate_size = metadata.size("feed_forward_length")
    num_chosen = metadata.size("expert_used_count")
    if metadata.architecture == "llama":
        return {
            "num_local_experts": metadata.size("expert_count"),
            "num_experts_per_tok": num_chosen,
        }
    is_shared = metadata.architecture == "qwen2moe"
    metadata.expect("expert_weights_norm", not is_shared, default=not is_shared)
    shared_size = metadata.size("expert_shared_feed_forward_length", intermediate_size)
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": num_chosen,
        "norm_topk_prob": not is_shared,
        "moe_intermediate_size": metadata.size(
            "expert_feed_forward_length", intermediate_size // max(1, num_chosen)
        ),
        **({"shared_expert_intermediate_size": shared_size} if is_shared else {}),
    }


def _gemma2(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp knows by the number of layers which one divides by another root."""
    return {
        "query_pre_attn_scalar": _query_divisor(values, num_layers=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
    }


def _gemma3(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "query_pre_attn_scalar": _query_divisor(values, num_layers=62),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": metadata.size("attention.sliding_window"),
    }
    if metadata.has("final_logit_softcapping"):
        settings["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    if flags := metadata.flags("attention.sliding_window_pattern"):
        names = ("full_attention", "sliding_attention")
        settings["layer_types"] = [names[flag] for flag in flags]
    return settings


def _query_divisor(values: dict[str, Any], num_layers: int) -> int:
    is_largest = values["num_hidden_layers"] == num_layers
    quotient: int = values["hidden_size"] // values["num_attention_heads"]
    head_dim: int = values["head_dim"]
    return quotient if is_largest else head_dim


def _phi3(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    length = values["max_position_embeddings"]
    return {
        "sliding_window": metadata.size("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.size(
            "rope.scaling.original_context_length", length
        ),
    }


def _granite(metadata: Metadata, _values: dict[str, Any]) -> dict[str, Any]:
    head_dim = _values["head_dim"]
    metadata.expect("rope.scaling.finetuned", True, default=True)  # else heads do not rotate
    return {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


_READERS: Final[dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}
