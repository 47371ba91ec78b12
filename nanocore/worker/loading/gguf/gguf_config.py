"""config.json and generation_config.json of a GGUF model, made of its settings.

The reader of these files checks them as any other. Defaults are llama.cpp's, where its converter
leaves something out. A setting that nobody takes is refused: the converter writes what a model
differs in, so an unknown one may change the output. llama.cpp keeps Llama 3's and LongRoPE's
stretching as tensors: a factor for each pair of values.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.gguf.architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    architecture_name,
    find_tensor,
)
from nanocore.worker.loading.gguf.gguf_files import read_headers
from nanocore.worker.loading.gguf.gguf_vocabulary import GgufVocabulary, end_token_ids
from nanocore.worker.loading.gguf.header import FLOATS, Header

_NO_MATTER: Final = frozenset(
    {
        "vocab_size", "tensor_data_layout", "pooling_type", "attention.layer_norm_epsilon",
        "rope.scaling.finetuned", "rope.dimension_sections",
    }
)  # fmt: skip
"""Said elsewhere too, or of uses other than generating."""


class Metadata(Settings):
    """Settings by names without their architecture's before them; it is one of `ARCHITECTURES`."""

    def __init__(self, header: Header) -> None:
        self.architecture = architecture_name(header)
        prefix, items = f"{self.architecture}.", header.metadata.items()
        values = {key.removeprefix(prefix): value for key, value in items if key.startswith(prefix)}
        super().__init__(header.path, values, self.architecture)

    def integer(self, name: str, default: int | None = None, *, but: int | None = None) -> int:
        """An integer; where there is one for each layer, that of all, or of all `but` those that
        have this one. config.json's reader checks its range."""
        kind: Any = list[int] | int
        value = self.required(name, kind) if default is None else self.get(name, kind, default)
        values = {value} if isinstance(value, int) else {*value} - {but}
        if len(values) != 1:
            raise self.error(name, "is not one integer, and only models of equal layers are served")
        return values.pop()

    def expect(self, name: str, value: Any, *, unless: bool = False) -> None:
        """Refuse any other value than this."""
        if self.is_set(name) and self.values[name] != value and not unless:
            raise self.error(name, f"is not served: only {value} is")

    def check_all_read(self) -> None:
        for name in self.values:
            if not self.was_read(name) and name not in _NO_MATTER:
                raise self.error(name, "is a setting that is not served")


_MAX_FACTORS: Final = 4096


def rope_settings(metadata: Metadata, headers: list[Header]) -> dict[str, Any]:
    """config.json's settings of the rotation.

    Raises ModelFileError: a kind of stretching that is not served.
    """
    settings: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", float, 10_000.0)}
    shared, long, short = (_factors(headers, name) for name in ROPE_FACTORS)
    length = metadata.integer("context_length")
    original = metadata.integer("rope.scaling.original_context_length", length)
    scaling = _scaling(metadata, original)
    if long and short:
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["original_max_position_embeddings"] = original
        scaling["attention_factor"] = metadata.get("rope.scaling.attn_factor", float, 1.0)
    elif shared:
        if scaling:
            raise ModelFileError(
                f"{metadata.source}: rope_freqs together with rope.scaling.type is not served"
            )
        # Llama 3's: whatever stretched a pair, its factor is there for every length.
        scaling = {"rope_type": "longrope", "long_factor": shared, "short_factor": shared}
        scaling |= {"original_max_position_embeddings": length, "attention_factor": 1.0}
    metadata.expect("rope.scaling.attn_factor", 1.0, unless=bool(long))
    return settings | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata, original: int) -> dict[str, Any]:
    kind = metadata.get("rope.scaling.type", str, "none")
    linear = metadata.get("rope.scale_linear", float, 1.0)
    factor = metadata.get("rope.scaling.factor", float, linear)
    if kind == "yarn":
        metadata.expect("rope.scaling.yarn_attn_factor", 1.0)
        metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", float, 1.0),
        }
    if kind not in ("none", "linear", "longrope"):
        raise metadata.error("rope.scaling.type", "is not served; known: linear, longrope, yarn")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}


def _factors(headers: list[Header], name: str) -> list[float]:
    info = find_tensor(headers, name)
    if info is None:
        return []
    if info.type.name != "F32" or math.prod(info.shape) > _MAX_FACTORS:
        raise ModelFileError(
            f"{info.path}: {name} is {info.type.name} {list(info.shape)}: at most {_MAX_FACTORS} "
            "numbers of float32 are served"
        )
    try:
        with info.path.open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.num_bytes)
    except OSError as error:
        raise ModelFileError(f"{info.path}: {error.strerror or error}") from None
    if len(content) < info.num_bytes:
        raise ModelFileError(f"{info.path} became shorter while it was read")
    return [factor for (factor,) in struct.iter_unpack("<f", content)]


_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_settings(first: Path) -> Settings:
    """config.json's.

    Raises ModelFileError: the architecture is not served, or a setting is missing or not served.
    """
    headers = read_headers(first)
    metadata = Metadata(headers[0])
    family = ARCHITECTURES[metadata.architecture]
    is_sparse = metadata.has("expert_count") and metadata.integer("expert_count") > 0
    class_name = family.sparse_class if is_sparse else family.class_name
    if not class_name:
        raise metadata.error("expert_count", "is not served for this architecture")
    sizes = _sizes(metadata, headers)
    values: dict[str, Any] = {
        "architectures": [class_name],
        **sizes,
        **rope_settings(metadata, headers),
        **(_experts(metadata, sizes["intermediate_size"]) if is_sparse else {}),
    }
    if (read := _READERS.get(metadata.architecture)) is not None:
        values |= read(metadata, values)
    metadata.expect("attention.causal", True)
    metadata.expect("expert_used_count", 0, unless=is_sparse)
    metadata.check_all_read()
    return Settings(f"{first} (settings as config.json has them)", values)


def generation_values(first: Path, vocabulary: GgufVocabulary | None) -> dict[str, Any]:
    """generation_config.json's: what ends a text, and the sampling that the makers recommend."""
    header = read_headers(first)[0]
    values: dict[str, Any] = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    if vocabulary is not None and (ids := end_token_ids(vocabulary)):
        values["eos_token_id"] = ids
    return values


def _sizes(metadata: Metadata, headers: list[Header]) -> dict[str, Any]:
    embedding = find_tensor(headers, "token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{metadata.source}: token_embd.weight is missing")
    num_heads, hidden_size = metadata.integer("attention.head_count"), embedding.shape[-1]
    if metadata.integer("embedding_length") != hidden_size:
        raise metadata.error("embedding_length", f"and token_embd.weight has {hidden_size}")
    head_dim = metadata.integer("attention.key_length", hidden_size // max(1, num_heads))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.error("attention.value_length", f"is not attention.key_length, {head_dim}")
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    partial = {"partial_rotary_factor": rotary_dim / head_dim} if head_dim != rotary_dim else {}
    has_states = {"shortconv.l_cache", "ssm.conv_kernel"} & metadata.values.keys()  # no KV heads
    expert_size = metadata.get("expert_feed_forward_length", int, None)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length", expert_size),
        "num_hidden_layers": metadata.integer("block_count")
        - metadata.integer("nextn_predict_layers", 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(
            "attention.head_count_kv", num_heads, but=0 if has_states else None
        ),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.required("attention.layer_norm_rms_epsilon", float),
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
    num_bytes = Counter[str]()
    for header in headers:
        for info in header.tensors:
            if len(info.shape) > 1:
                num_bytes[info.type.name] += info.num_bytes
    if set(num_bytes) - set(FLOATS):
        return "bfloat16"
    return _DTYPES[max(num_bytes, key=lambda name: num_bytes[name], default="F32")]


def _experts(metadata: Metadata, intermediate_size: int) -> dict[str, Any]:
    is_lfm2 = metadata.architecture == "lfm2moe"
    metadata.expect("expert_gating_func", 2 if is_lfm2 else 1)  # sigmoid, softmax
    metadata.expect("expert_weights_scale", 1.0)
    num_chosen = metadata.integer("expert_used_count")
    if metadata.architecture == "llama":
        return {
            "num_local_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": num_chosen,
        }
    is_normalized = metadata.architecture != "qwen2moe"
    metadata.expect("expert_weights_norm", is_normalized)
    own: dict[str, Any] = {}
    if metadata.architecture in ("qwen2moe", "qwen3next", "qwen35moe"):
        shared_size = metadata.integer("expert_shared_feed_forward_length", intermediate_size)
        own["shared_expert_intermediate_size"] = shared_size
    elif is_lfm2:
        own["num_dense_layers"] = metadata.integer("leading_dense_block_count", 0)
        own["use_expert_bias"] = True
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": num_chosen,
        "norm_topk_prob": is_normalized,
        "moe_intermediate_size": metadata.integer(
            "expert_feed_forward_length", intermediate_size // max(1, num_chosen)
        ),
        **own,
    }


def _gemma2(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp tells by the number of layers which model divides by another root.
    return {
        "query_pre_attn_scalar": _query_divisor(values, num_layers=46),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float, 30.0),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
    }


def _gemma3(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "query_pre_attn_scalar": _query_divisor(values, num_layers=62),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", float, 10_000.0),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float, None),
    }
    if flags := metadata.get("attention.sliding_window_pattern", list[bool], []):
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
    original = metadata.integer("rope.scaling.original_context_length", length)
    return {
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }


def _granite(metadata: Metadata, _values: dict[str, Any]) -> dict[str, Any]:
    head_dim = _values["head_dim"]
    metadata.expect("rope.scaling.finetuned", True)  # else heads do not rotate
    return {
        "attention_multiplier": metadata.get("attention.scale", float, head_dim**-0.5),
        "embedding_multiplier": metadata.get("embedding_scale", float, 1.0),
        "residual_multiplier": metadata.get("residual_scale", float, 1.0),
        "logits_scaling": metadata.get("logit_scale", float, 1.0),
    }


def _lfm2(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    num_kv_heads = metadata.required("attention.head_count_kv", list[int])
    return {
        "layer_types": ["full_attention" if number else "conv" for number in num_kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "norm_eps": values["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _delta_net(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    num_values = metadata.integer("ssm.time_step_rank")
    settings: dict[str, Any] = {
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(1, num_values),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "full_attention_interval": metadata.integer("full_attention_interval", 4),
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
    }
    if flags := metadata.get("attention.recurrent_layers", list[bool], []):
        names = ("full_attention", "linear_attention")
        settings["layer_types"] = [names[flag] for flag in flags[: values["num_hidden_layers"]]]
    return settings


_READERS: Final[dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen3next": _delta_net,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
}
