"""LoRA adapters in PEFT's layout, written by hand, and what they make of a model's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 4, 6
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write an adapter of modules of these shapes [O, I]; returns A and B of each.

    ranks: of modules whose rank is not RANK. settings: more of adapter_config.json's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs, tensors = {}, {}
    for seed, (module, (num_rows, num_columns)) in enumerate(shapes.items()):
        random = torch.Generator().manual_seed(seed)
        rank = (ranks or {}).get(module, RANK)
        a = (torch.randn(rank, num_columns, generator=random) / math.sqrt(num_columns)).to(dtype)
        b = (torch.randn(num_rows, rank, generator=random) / 2).to(dtype)
        pairs[module] = (a, b)
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    config["target_modules"] = sorted({module.rpartition(".")[2] for module in shapes})
    write_config(folder, config | settings)
    return pairs


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


def modules_of(folder: Path, ends: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Linear layers of a model's file whose names end so, and their shapes [O, I]."""
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.removesuffix(".weight").endswith(tuple(ends)) and tensor.dim() == 2
    }
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def merge_files(
    folder: Path, merged: Path, pairs: dict[str, tuple[Tensor, Tensor]], scales: dict[str, float]
) -> Path:
    """Write the model with the adapter's products added in float64; returns its folder."""
    merged.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (merged / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for module, (a, b) in pairs.items():
        name = f"{module}.weight"
        whole = tensors[name].double() + scales[module] * (b.double() @ a.double())
        tensors[name] = whole.to(tensors[name].dtype)
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    return merged
