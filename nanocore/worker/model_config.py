"""What config.json says of a model, parsed by us into one shape; no code of the model is ever run.

Both spellings of rotary settings are read (`rope_theta` with `rope_scaling`, and the newer
`rope_parameters`). A setting that would change the model's output and is not implemented is
refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nanocore.protocol.errors import ModelFileError

ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer's sizes. dtype: the checkpoint's, as torch spells it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _ConfigJson(msgspec.Struct):
    """The fields of config.json that we read; others describe training or other frameworks."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: msgspec.Raw | None = None


class _GenerationJson(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a Hugging Face folder.

    Raises:
        ModelFileError: a missing or malformed file, an unknown architecture, or a setting that is
            not implemented.
    """
    if not folder.is_dir():
        raise ModelFileError(
            f"model {str(folder)!r} is not a folder: give the path of a folder in Hugging Face "
            "format (config.json, *.safetensors, tokenizer.json)"
        )
    path = folder / "config.json"
    raw = _read_json(path, _ConfigJson)
    architecture = raw.architectures[0] if raw.architectures else "none"
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: architecture {architecture!r} is unknown; known: {', '.join(ARCHITECTURES)}"
        )
    rope = raw.rope_parameters or raw.rope_scaling or _Rope()
    for setting, value, supported in (
        ("hidden_act", raw.hidden_act, raw.hidden_act == "silu"),
        ("attention_bias", raw.attention_bias, not raw.attention_bias),
        ("use_sliding_window", raw.use_sliding_window, not raw.use_sliding_window),
        ("rope_type", rope.kind, rope.kind == "default"),
        ("quantization_config", "present", raw.quantization_config is None),
    ):
        if not supported:
            raise ModelFileError(f"{path}: {setting} = {value} is not implemented")
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ModelFileError(
            f"{path}: {raw.num_attention_heads} heads cannot share {num_kv_heads} KV heads evenly"
        )
    generation = folder / "generation_config.json"
    eos = _read_json(generation, _GenerationJson).eos_token_id if generation.exists() else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        max_model_len=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=rope.rope_theta or raw.rope_theta or 10_000.0,
        tie_word_embeddings=raw.tie_word_embeddings,
        dtype=raw.dtype or raw.torch_dtype or "float32",
        eos_token_ids=_as_ids(eos if eos is not None else raw.eos_token_id),
    )


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path, schema: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=schema)
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(f"{path}: {error}") from None
