"""Architectures served from GGUF files, and their tensors by the names that checkpoints have.

llama.cpp's converter reorders rows of Q and K: `GgufArchitecture` says so, and `gguf_format` undoes
it. Floats are `NAME.weight`, as in safetensors files; blocks are
`NAME.blocks`, bytes in rows. Experts in one tensor become one each, at places within it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.config.json_settings import MAX_SIZE, Settings
from nanocore.worker.loading.gguf.gguf_files import read_headers
from nanocore.worker.loading.gguf.header import FLOATS, Header, TensorInfo


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A family.

    class_name: as config.json has it. sparse_class: likewise where there are experts, None where
    the family has none. has_pairs: heads of Q and K have the values that rotate together side by
    side, and not half a head apart.
    """

    class_name: str
    sparse_class: str | None = None
    has_pairs: bool = False


ARCHITECTURES: Final = {
    "llama": GgufArchitecture("LlamaForCausalLM", "MixtralForCausalLM", has_pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen2moe": GgufArchitecture("", "Qwen2MoeForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("", "Qwen3MoeForCausalLM"),
    "gemma": GgufArchitecture("GemmaForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM"),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM"),
    "phi3": GgufArchitecture("Phi3ForCausalLM"),
    "granite": GgufArchitecture("GraniteForCausalLM", has_pairs=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", has_pairs=True),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM"),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM"),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM"),
    "lfm2moe": GgufArchitecture("", "Lfm2MoeForCausalLM"),
    "qwen3next": GgufArchitecture("", "Qwen3NextForCausalLM"),
    "qwen35": GgufArchitecture("Qwen3_5ForCausalLM"),
    "qwen35moe": GgufArchitecture("", "Qwen3_5MoeForCausalLM"),
}


def architecture_name(header: Header) -> str:
    """One of `ARCHITECTURES`. Raises ModelFileError for another, or none."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelFileError(
            f"{header.path}: general.architecture = {shorten(repr(name))} is not served as GGUF; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    return name


BLOCKS: Final = "blocks"
"""The slot of what is stored in blocks."""
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Settings in the form of tensors; see `rope`."""

_ENDS: Final = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "token_embd_norm": "model.norm",  # LFM2's, whose last norm checkpoints name after embeddings
}  # fmt: skip
_LAYER: Final = re.compile(r"blk\.(\d{1,9})\.([\w.]+?)(?:\.(?:weight|bias))?")
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_NORMS_ON_BOTH_SIDES: Final = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LFM2: Final = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    "exp_probs_b": "feed_forward.expert_bias",
}  # fmt: skip
_DELTA_NET: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_OTHER_NAMES: Final = {
    "gemma2": _NORMS_ON_BOTH_SIDES,
    "gemma3": _NORMS_ON_BOTH_SIDES,
    "olmo2": _NORMS_ON_BOTH_SIDES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen3next": _DELTA_NET,
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET,
}


def gguf_tensors(first: Path) -> list[TensorInfo]:
    """All of a model, file by file, each in file order. Their names are those that checkpoints have
    for their projections, and "weight", "bias" or `BLOCKS`; what has no such name keeps its own.
    Layers after the model's, which guess further tokens, are left out.

    Raises ModelFileError: see `read_headers`; or the architecture is not served.
    """
    headers = read_headers(first)
    architecture = architecture_name(headers[0])
    names = _IN_LAYER | _OTHER_NAMES.get(architecture, {})
    settings = Settings(first, headers[0].metadata)
    num_layers = settings.get(f"{architecture}.block_count", int, MAX_SIZE)
    num_layers -= settings.get(f"{architecture}.nextn_predict_layers", int, 0)
    return [
        tensor
        for header in headers
        for info in sorted(header.tensors, key=lambda info: info.offset)
        if info.name not in ROPE_FACTORS
        for tensor in _named(info, names, num_layers)
    ]


def find_tensor(headers: list[Header], name: str) -> TensorInfo | None:
    infos = (info for header in headers for info in header.tensors if info.name == name)
    return next(infos, None)


def _named(info: TensorInfo, names: dict[str, str], num_layers: int) -> list[TensorInfo]:
    end, _, kind = info.name.rpartition(".")
    shape, found = info.shape, _LAYER.fullmatch(info.name)
    if found and int(found[1]) >= num_layers:
        return []
    if end in _ENDS and kind in ("weight", "bias"):
        name = _ENDS[end]
    elif found and found[2] in names:
        name = f"model.layers.{int(found[1])}.{names[found[2]]}"
        if name.endswith("shared_expert_gate"):  # a vector, in converters' own files one row
            shape = (1, shape[-1])
        elif name.endswith(("conv.conv", "conv1d")):
            # [channels, taps], and in checkpoints one input of each.
            shape = (shape[0], 1, *shape[1:])
        elif name.endswith(("_bias", "A_log")):  # which have no kind in checkpoints
            return [replace(info, name=name)]
    else:
        return [info]
    if kind == "weight" and info.type.name not in FLOATS:
        kind = BLOCKS
    if "{}" not in name or len(shape) < 2:
        return [replace(info, name=f"{name}.{kind}", shape=shape)]
    size = info.num_bytes // shape[0]
    first = replace(info, shape=shape[1:], num_bytes=size)
    return [
        replace(first, name=f"{name.format(i)}.{kind}", offset=info.offset + i * size)
        for i in range(shape[0])
    ]
