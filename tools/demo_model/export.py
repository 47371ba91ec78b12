"""Write the demo model as a Hugging Face folder, and the history of its training.

The weights are rounded to bf16 and named as transformers names those of Qwen3ForCausalLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.demo_model.model import DemoModel
from tools.demo_model.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_END

EOS_ID, PAD_ID = SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)


def hf_config(model: DemoModel) -> dict[str, object]:
    """config.json in the form that transformers 5 writes."""
    config = model.config
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_window_layers": config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a line end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Rows of the same columns as CSV; a very short run has none."""
    header = [",".join(rows[0])] if rows else []
    lines = [*header, *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def export(model: DemoModel, folder: Path) -> None:
    """Write weights and configuration; the tokenizer's files are written by `tokenizer.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.bfloat16) for n, p in model.state_dict().items()}
    partial = folder / "model.safetensors.part"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    write_json(folder / "config.json", hf_config(model))
    generation = {"do_sample": False, "eos_token_id": [EOS_ID, PAD_ID], "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", generation)


def write_history(
    work: Path, losses: Sequence[dict[str, float]], accuracies: Sequence[dict[str, float]]
) -> None:
    """Two tables and history.png: the loss by tokens, the accuracy by task over time."""
    work.mkdir(parents=True, exist_ok=True)
    write_rows(work / "loss.csv", losses)
    write_rows(work / "accuracy.csv", accuracies)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    left.plot([r["tokens"] / 1e6 for r in losses], [r["loss"] for r in losses])
    left.set(yscale="log", xlabel="million tokens", ylabel="loss on answers")
    for index, task in enumerate(t for t in accuracies[0] if t not in ("minutes", "tokens")):
        minutes = [r["minutes"] for r in accuracies]
        style = "--" if index > 5 else "-"
        right.plot(minutes, [r[task] for r in accuracies], style, label=task)
    right.set(ylim=(0, 1.02), xlabel="minutes", ylabel="held-out answers right")
    right.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(work / "history.png", dpi=90)
    pyplot.close(figure)
