"""Tiny Qwen3 models with seeded random weights, as ordinary Hugging Face folders.

Weights are scaled so that logits are spread and greedy text depends on the whole context: a wrong
KV slot then changes tokens instead of hiding.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 384
EOS = VOCAB_SIZE - 1
MAX_MODEL_LEN = 1024


def make_tiny_qwen3(
    folder: Path,
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    head_dim: int = 24,
) -> Path:
    """Write a model folder and return it.

    tied: share embedding and head. shards: split the weights over about this many files.
    head_dim: not hidden_size / heads, and no whole vectors, unless asked for.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    config.dtype = dtype
    model = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                value = 2.0 + 0.1 * noise  # attention that looks at something
            elif "norm" in name:
                value = 1.0 + 0.1 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = 3.0 * noise / math.sqrt(config.hidden_size)
            else:
                value = noise / math.sqrt(parameter.shape[-1])
                if "o_proj" in name or "down_proj" in name:
                    value *= 3.0  # the context outweighs the echo of the last token
            parameter.copy_(value)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-num_bytes // shards))
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte, then fillers, EOS last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    vocab |= {f"<filler{i}>": i for i in range(len(alphabet), EOS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    config = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
