"""The demo model: a small Qwen3 of transformers, its loss, and its folder.

A batch is right-padded, so causal attention needs no mask. Weights are written in bf16.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.data import Batch
from tools.demo_model.tokenizer import END_OF_TEXT, MAX_POSITIONS, SPECIAL_TOKENS, TURN_END

EOS_ID, PAD_ID = SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    """The model with random weights; what adds to the residual stream begins smaller."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3ForCausalLM(config)
    depth_scale = (2 * config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.04 * (depth_scale if residual else 1.0))
    return model


def batch_loss(model: Qwen3ForCausalLM, batch: Batch, bf16: bool = True) -> Tensor:
    """Cross-entropy of the tokens to be learned, computed in bf16 or in float32."""
    ids, targets = batch
    wanted = targets.flatten() >= 0
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[wanted])
    return F.cross_entropy(logits.float(), targets.flatten()[wanted])


def export(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write weights and configuration; the tokenizer's files are written by `tokenizer.py`."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.update(
        do_sample=False, eos_token_id=[EOS_ID, PAD_ID], pad_token_id=PAD_ID
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # not for our eyes alone
