"""Weights in E4M3 with scales of the whole, of outputs, or of blocks.

`Float8Layout` serves every format that has such weights; `Fp8Format` is the one that Qwen and
DeepSeek publish (quant_method "fp8"), whose `weight_scale_inv` multiplies, in spite of its name. A
rank's slice may cut through blocks: they are then made smaller, with the same scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import Float8Weight
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.formats.quantization_config import (
    CheckpointTensors,
    refuse_if_set,
    refuse_unless,
)
from nanocore.worker.loading.weights import CheckpointProjection, Index, Projection, Slot

BLOCK: Final = 128
Scales = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, slots=True)
class Float8Layout:
    """Layout of a format's E4M3 weights.

    scales: what one is of. scale_name: their tensor's. has_input_scale: one for activations lies
    beside them; it is read and not used, since kernels find their own for each token. marker: a
    tensor that only a module stored so has.
    """

    scales: Scales
    scale_name: str
    has_input_scale: bool

    def __str__(self) -> str:
        """Kernels say, and not the checkpoint, how activations are rounded."""
        of = {"tensor": "each weight", "channel": "each output", "block": "blocks of 128 x 128"}
        static = "; its input_scale is not used" if self.has_input_scale else ""
        return f"E4M3, a scale for {of[self.scales]} (on a CPU int8, one for each output){static}"

    @property
    def marker(self) -> str:
        return self.scale_name

    def projection(self, kept: Projection, stored: CheckpointTensors) -> CheckpointProjection:
        name, shape, rows, columns = kept.name, kept.shape, kept.rows, kept.columns
        dtype = stored.float_dtype(f"{name}.{self.scale_name}", torch.float32)
        slots = {"weight": Slot(shape, torch.float8_e4m3fn, (rows, columns))}
        block = BLOCK
        index: Index
        if self.scales == "block":
            block = math.gcd(rows.start, columns.start, BLOCK)
            index = (_blocks(rows), _blocks(columns))
            blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            slots[self.scale_name] = Slot(blocks, dtype, index)
        else:
            whole: tuple[tuple[int, ...], ...] = ((), (1,))
            of_outputs = (shape[0], 1)
            served = (of_outputs,) if self.scales == "channel" else (*whole, of_outputs)
            scale_shape = stored.shape(f"{name}.{self.scale_name}", *served)
            index = (rows, slice(0, 1)) if scale_shape == of_outputs else ()
            slots[self.scale_name] = Slot(scale_shape, dtype, index)
        if self.has_input_scale or stored.has(f"{name}.input_scale"):
            slots["input_scale"] = input_scale_slot(name, stored)
        return CheckpointProjection(slots, partial(_unpack, self, rows, columns, block))


def input_scale_slot(name: str, stored: CheckpointTensors) -> Slot:
    """Slot of the one number that a static activation scheme has."""
    tensor = f"{name}.input_scale"
    dtype = stored.float_dtype(tensor, torch.float32)
    return Slot(stored.shape(tensor, (1,), ()), dtype, ())


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _unpack(
    layout: Float8Layout, rows: slice, columns: slice, block: int, tensors: Mapping[str, Tensor]
) -> Float8Weight:
    values_OI, scale = tensors["weight"], tensors[layout.scale_name].float()
    if layout.scales != "block":
        return Float8Weight(values_OI, scale.reshape(-1, 1).expand(len(values_OI), 1).contiguous())
    if block != BLOCK:
        scale = _smaller(_smaller(scale, rows, block).t(), columns, block).t().contiguous()
    return Float8Weight(values_OI, scale, block)


def _smaller(scale: Tensor, part: slice, block: int) -> Tensor:
    first = part.start // BLOCK
    starts = torch.arange(part.start, part.stop, block, device=scale.device)
    return scale[starts // BLOCK - first]


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A `WeightFormat`."""

    layout: Float8Layout
    stored: CheckpointTensors
    name: str = "fp8"

    @classmethod
    def read(cls, settings: Settings, stored: CheckpointTensors) -> Fp8Format:
        refuse_unless(settings, "fmt", str, ("e4m3", "float8_e4m3fn"))
        scheme = refuse_unless(settings, "activation_scheme", str, ("dynamic", "static"))
        refuse_if_set(settings, "kv_cache_scheme")
        block = settings.get("weight_block_size", list[int], [])
        if block not in ([], [BLOCK, BLOCK]):
            raise settings.error("weight_block_size", f"is not served: [{BLOCK}, {BLOCK}] is")
        layout = Float8Layout(
            "block" if block else "tensor",
            "weight_scale_inv" if block else "weight_scale",
            has_input_scale=scheme == "static",
        )
        return cls(layout, stored)

    def __str__(self) -> str:
        return f"FP8: {self.layout}"

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        if not self.stored.has(f"{kept.name}.{self.layout.scale_name}"):
            return None
        return self.layout.projection(kept, self.stored)
