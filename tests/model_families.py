"""Tiny random models of every family, as ordinary Hugging Face folders, and what they should say.

Each exercises its family's oddities at sizes where they change the text: windows shorter than the
prompts, caps that bend, rotations stretched within the first hundred positions. Two ranks can
share every one of them. Weights are scaled as in `tests.tiny_models`.
"""

from __future__ import annotations

import copy
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import EOS, MAX_MODEL_LEN, VOCAB_SIZE, write_byte_tokenizer

FULL, SLIDING = "full_attention", "sliding_attention"

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
LINEAR = "linear_attention"
DELTA: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 16,  # not head_dim, on purpose
    "tie_word_embeddings": True,
}


VISION: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {"image_size": 28, "patch_size": 14},
    "pixtral": {"image_size": 32, "patch_size": 16, "head_dim": 8},
    "qwen3_5_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
}
"""The part that sees, by its kind; as small as it gets."""


def image_text(vision: str, text: str, settings: dict[str, Any], **whole: Any) -> dict[str, Any]:
    """Settings of a model that also sees images. vision, text: the kinds of its parts."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "model_type": vision}
    text_config = SIZES | settings | {"model_type": text}
    return {"text_config": text_config, "vision_config": small | VISION[vision], **whole}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen2_yarn": (
        "Qwen2ForCausalLM",
        rope("yarn", factor=8.0, original_max_position_embeddings=128),
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_unnormalized": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"head_dim": 24, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 2,
            "hidden_act": "gelu_new",
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", FULL, "conv", "conv", FULL],
            "num_hidden_layers": 5,
            "conv_bias": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm2_indexed": (
        "Lfm2ForCausalLM",
        {
            "full_attn_idxs": [1],
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        EXPERTS
        | {
            "layer_types": ["conv", FULL, "conv", FULL],
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.3,
        },
    ),
    "llama": ("LlamaForCausalLM", {"head_dim": 24, "num_attention_heads": 8}),
    "llama_biased": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "swish"},
    ),
    "llama_llama3": (
        "LlamaForCausalLM",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        {"max_position_embeddings": MAX_MODEL_LEN // 4} | rope("linear", factor=4.0),
    ),
    "llama_dynamic": (
        "LlamaForCausalLM",
        {"max_position_embeddings": MAX_MODEL_LEN // 8} | rope("dynamic", factor=8.0),
    ),
    "qwen35": (
        "Qwen3_5ForCausalLM",
        DELTA | {"num_hidden_layers": 5, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]},
    ),
    "qwen35_square": (
        "Qwen3_5ForCausalLM",
        DELTA
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {"num_hidden_layers": 4, "full_attention_interval": 2},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        DELTA
        | EXPERTS
        | {"shared_expert_intermediate_size": 96, "mlp_only_layers": [1], "num_hidden_layers": 5}
        | {"layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]},
    ),
    "qwen35_moe": (
        "Qwen3_5MoeForCausalLM",
        DELTA
        | EXPERTS
        | {"shared_expert_intermediate_size": 96, "layer_types": [LINEAR, FULL, LINEAR]},
    ),
    "mistral": ("MistralForCausalLM", {"head_dim": 24, "sliding_window": 32}),
    "mistral_full": ("MistralForCausalLM", {"sliding_window": None}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 8, "intermediate_size": 48, "head_dim": 24},
    ),
    "mixtral_window": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 40},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        GEMMA
        | {"sliding_window": 40, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "sliding_window": 32,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma3_image_text": (
        "Gemma3ForConditionalGeneration",
        image_text(
            "siglip_vision_model",
            "gemma3_text",
            GEMMA | {"sliding_window": 32, "layer_types": [SLIDING, FULL, SLIDING]},
            mm_tokens_per_image=4,
        ),
    ),
    "qwen35_image_text": (
        "Qwen3_5ForConditionalGeneration",
        image_text(
            "qwen3_5_vision",
            "qwen3_5_text",
            DELTA | {"layer_types": [LINEAR, FULL, FULL]},
            tie_word_embeddings=True,
        ),
    ),
    "ministral": (
        "MinistralForCausalLM",
        {"head_dim": 24, "sliding_window": 32, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {"head_dim": 24}
        | rope(
            "yarn",
            factor=2.0,
            original_max_position_embeddings=MAX_MODEL_LEN,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        image_text("pixtral", "mistral", {"head_dim": 24}, tie_word_embeddings=False),
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 162, "tie_word_embeddings": True}),
    "gpt2_unscaled": (
        "GPT2LMHeadModel",
        {"scale_attn_weights": False, "tie_word_embeddings": False, "layer_norm_epsilon": 0.1},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 4.0,
            "attention_multiplier": 0.125,  # not the root of head_dim, on purpose
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
            "rms_norm_eps": 0.1,
        },
    ),
    "granite_biased": (
        "GraniteForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.5}
        | {"residual_multiplier": 1.5, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "olmo2_ungrouped": ("Olmo2ForCausalLM", {"num_key_value_heads": None, "rms_norm_eps": 0.1}),
    "phi3": (
        "Phi3ForCausalLM",
        {"sliding_window": 40} | rope("default", partial_rotary_factor=0.5),
    ),
    "phi3_full": ("Phi3ForCausalLM", {"tie_word_embeddings": True}),
    "phi3_longrope": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 256}
        | rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.5, 2.0],
            long_factor=[1.2, 2.5, 6.0, 30.0],
            partial_rotary_factor=0.5,
        ),
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 24}),
    "seed_oss_other_biases": (
        "SeedOssForCausalLM",
        {"head_dim": 24, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40},
    ),
    "smollm3_listed": (
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": [FULL, SLIDING, FULL],
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
"""Architecture and settings by name; what is not said is in SIZES."""


def make_tiny(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model of this name and return its folder. fp32, one file. changes: of settings."""
    import transformers

    architecture, settings = SPECS[name]
    model_class = getattr(transformers, architecture)
    sizes = {} if "text_config" in settings else SIZES
    config = model_class.config_class(**copy.deepcopy(sizes | settings | changes))
    config.dtype = torch.float32
    model = model_class(config)
    buffers = [named for named in model.named_buffers() if named[0].endswith("expert_bias")]
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *buffers):
            text_config = config.get_text_config()
            parameter.copy_(_weight(parameter_name, parameter, architecture, text_config))
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def reference_model(folder: Path, **arguments: Any) -> Any:
    """transformers' model of a folder, of the class that config.json names."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, **arguments)


def text_model(model: Any) -> Any:
    """The decoder in one of transformers' models."""
    return getattr(model.base_model, "language_model", model.base_model)


BUILDERS: dict[str, Callable[[Path], Path]] = {name: partial(make_tiny, name) for name in SPECS}
"""By name: writes the model into a folder and returns it."""


ONE_OF_EACH = sorted({architecture: name for name, (architecture, _) in SPECS.items()}.values())
"""A model of each architecture, the last in SPECS: the others differ in settings."""


def _weight(name: str, parameter: Tensor, architecture: str, config: Any) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(parameter.shape, generator=generator)
    is_gemma = architecture.startswith("Gemma")
    if parameter.dim() == 1 and name.endswith("weight"):
        scale = 1.0
        if re.search(r"\b[qk]_(layer)?norm\.weight$", name):
            scale = 2.0  # attention that looks at something
        elif is_gemma and "post_" in name:
            scale = 10.0  # the context outweighs the echo of the last token
        stored_less = 1.0 if is_gemma else 0.0
        return scale - stored_less + 0.1 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name or "wte" in name or "wpe" in name or "lm_head" in name:
        return 3.0 * noise / math.sqrt(config.hidden_size)
    is_transposed = architecture.startswith("GPT2")
    weight = noise / math.sqrt(parameter.shape[0 if is_transposed else -1])
    if any(one in name for one in ("o_proj", "out_proj", "down_proj", "c_proj", "w2")):
        weight *= 3.0  # as above
    elif "c_attn" in name:
        weight[:, : 2 * config.hidden_size] *= 2.0
    elif name.endswith(("q_proj.weight", "k_proj.weight", ".gate.weight")):
        weight *= 2.0  # attention and routing that are decided
    elif "qkv_proj" in name:
        head_dim = config.hidden_size // config.num_attention_heads
        weight[: (config.num_attention_heads + config.num_key_value_heads) * head_dim] *= 2.0
    return weight


@dataclass(frozen=True)
class Continuation:
    """What a model says after a prompt. logits_TV: float32, those that token_ids maximize."""

    token_ids: list[int]
    logits_TV: Tensor


def greedy_continuations(
    folder: Path, prompts: list[list[int]], num_tokens: int, max_model_len: int = MAX_MODEL_LEN,
    dtype: torch.dtype = torch.float32, frequencies: Tensor | None = None, **changes: Any,
) -> list[Continuation]:  # fmt: skip
    """transformers' greedy text after each prompt, alone.

    Every token comes from a forward pass over the whole text, with eager attention and without a
    cache: slow, and with nothing to go wrong. EOS ends nothing.

    Args:
        folder: the model. max_model_len: what an engine would serve; it fixes dynamic RoPE, and
            LongRoPE.
        dtype: of weights and activations.
        frequencies: of the rotation, in place of the model's.
        changes: settings of config.json to override.
    """
    model = exact_model(folder, max_model_len, dtype, frequencies, **changes)
    return [_greedy(model, prompt, num_tokens) for prompt in prompts]


def exact_model(
    folder: Path, max_model_len: int = MAX_MODEL_LEN, dtype: torch.dtype = torch.float32,
    frequencies: Tensor | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """transformers' model with nothing to go wrong; arguments as in `greedy_continuations`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **changes)
    model = reference_model(
        folder, config=config, dtype=dtype, attn_implementation="eager",
        experts_implementation="eager",
    ).eval()  # fmt: skip
    rotary = getattr(text_model(model), "rotary_emb", None)
    if getattr(rotary, "rope_type", "") == "dynamic":
        _fix_dynamic_rope(rotary, max_model_len)
    if getattr(rotary, "rope_type", "") == "longrope":
        _fix_longrope(rotary, max_model_len)
    if frequencies is not None:
        rotary.inv_freq.copy_(frequencies)
    return model


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], num_tokens: int) -> Continuation:
    ids, rows = torch.tensor([prompt]), []
    for _ in range(num_tokens):
        rows.append(model(ids, use_cache=False).logits[0, -1].float())
        ids = torch.cat([ids, rows[-1].argmax().view(1, 1)], dim=1)
    return Continuation(ids[0, len(prompt) :].tolist(), torch.stack(rows))


def _fix_dynamic_rope(rotary: Any, max_model_len: int) -> None:
    """Give every text the frequencies that transformers gives one of max_model_len tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](rotary.config, "cpu", seq_len=max_model_len)
    rotary.inv_freq.copy_(inv_freq)
    rotary.max_seq_len_cached = max_model_len  # no growth below this
    rotary.original_max_seq_len = 0  # and no return


def _fix_longrope(rotary: Any, max_model_len: int) -> None:
    """Likewise; up to the original length nothing changes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, "cpu", seq_len=max_model_len)
    rotary.original_inv_freq.copy_(inv_freq)  # that of short texts


def rewrite_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Change a folder's config.json in place, e.g. to an older schema; returns the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder
