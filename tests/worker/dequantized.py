"""What quantized checkpoints mean, number by number, by their formats' definitions alone.

Nothing here is nanocore's, and nothing is fast: numpy in float64, as the formats' makers describe
them, to compare readers with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantized(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors by name, with a float32 `weight` for each quantized module.

    config: quantization_config.
    """
    modules = {name.rpartition(".")[0] for name in tensors}
    weights = dict(tensors)
    for module in modules:
        own = {
            name.rpartition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == module
        }
        weight = _weight(own, config)
        if weight is not None:
            for name in own:
                weights.pop(f"{module}.{name}")
            weights[f"{module}.weight"] = torch.from_numpy(weight).float()
            if "bias" in own:
                weights[f"{module}.bias"] = own["bias"]
    return weights


def _weight(own: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
    if "qweight" in own:
        return (_awq if config["quant_method"] == "awq" else _gptq)(own, config)
    if "weight_packed" in own:
        return _packed(own)
    scale = own.get("weight_scale_inv", own.get("weight_scale"))
    if scale is None:
        return None
    values, scales = own["weight"].double().numpy(), scale.double().numpy()
    if "weight_scale_inv" in own:
        rows, columns = (np.arange(size) // 128 for size in values.shape)
        scales = scales[rows[:, None], columns[None, :]]
    return values * scales


def _bits(words: Tensor, place: int, bits: int) -> Any:
    return (words.numpy().astype(np.int64) & 0xFFFFFFFF) >> (bits * place) & ((1 << bits) - 1)


def _awq(own: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
    scales = own["scales"].double().numpy()
    weight = np.empty((scales.shape[1], own["qweight"].shape[0]))
    group = np.arange(weight.shape[1]) // config["group_size"]
    for place in range(8):
        values = _bits(own["qweight"], AWQ_ORDER[place], 4)
        zeros = _bits(own["qzeros"], AWQ_ORDER[place], 4)
        weight[place::8] = ((values - zeros[group]) * scales[group, place::8]).T
    return weight


def _gptq(own: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
    bits = config["bits"]
    scales, group = own["scales"].double().numpy(), own["g_idx"].numpy()
    weight = np.empty((scales.shape[1], len(group)))
    zeros = np.empty(scales.shape)
    for place in range(32 // bits):
        zeros[:, place :: 32 // bits] = _bits(own["qzeros"], place, bits)
        weight[:, place :: 32 // bits] = _bits(own["qweight"], place, bits).T
    if config.get("checkpoint_format", "gptq") == "gptq":
        zeros += 1
    return (weight - zeros[group].T) * scales[group].T


def _packed(own: Mapping[str, Tensor]) -> Any:
    num_rows, num_columns = own["weight_shape"].tolist()
    scales = own["weight_scale"].double().numpy()
    weight = np.empty((num_rows, num_columns))
    zeros = np.full(scales.shape, 8.0)
    for place in range(8):
        weight[:, place::8] = _bits(own["weight_packed"], place, 4)
        if "weight_zero_point" in own:
            zeros[place::8] = _bits(own["weight_zero_point"], place, 4)
    group = np.arange(num_columns) // (num_columns // scales.shape[1])
    return (weight - zeros[:, group]) * scales[:, group]
