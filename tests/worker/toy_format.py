"""A checkpoint format for tests: each projection by a rule of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import Float8Weight, GroupedWeight
from nanocore.kernels.linear_weight import FP8
from nanocore.worker.loading.weights import CheckpointProjection, Projection, Slot

GROUP = 16


class ToyFormat:
    """Implements `WeightFormat`. kinds: by the last word of a projection's name; else floats.

    "four": four bits, symmetric. "zeros": with zero points. "float8": a scale for each output.
    """

    name = "toy"

    def __init__(self, **kinds: str) -> None:
        self.kinds = kinds

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        kind = self.kinds.get(kept.name.rpartition(".")[2])
        if kind is None:
            return None
        shape, rows, columns = kept.shape, kept.rows, kept.columns
        num_rows, num_columns = shape
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        of_groups = (num_rows, num_columns // GROUP)
        if kind == "float8":
            slots = {
                "weight": Slot(shape, FP8, (rows, columns)),
                "weight_scale": Slot((num_rows, 1), torch.float32, (rows,)),
            }
        else:
            slots = {
                "values": Slot(shape, torch.uint8, (rows, columns)),
                "scales": Slot(of_groups, torch.float16, (rows, groups)),
            }
        if kind == "zeros":
            slots["zeros"] = Slot(of_groups, torch.uint8, (rows, groups))
        return CheckpointProjection(slots, partial(_unpack, kind))


def _unpack(kind: str, slots: Mapping[str, Tensor]) -> GroupedWeight | Float8Weight:
    if kind == "float8":
        return Float8Weight(slots["weight"], slots["weight_scale"])
    return GroupedWeight(slots["values"], 4, GROUP, slots["scales"], slots.get("zeros"))


def stored_tensors(
    name: str, kind: str | None, shape: tuple[int, int], seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """(a projection's tensors in a checkpoint, what they mean: float32 [O, I])."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    if kind is None:
        return {f"{name}.weight": values}, values
    if kind == "float8":
        tensors = {
            "weight": values.to(FP8),
            "weight_scale": torch.rand(shape[0], 1, generator=random) + 0.5,
        }
    else:
        of_groups = (shape[0], shape[1] // GROUP)
        tensors = {
            "values": torch.randint(0, 16, shape, dtype=torch.uint8, generator=random),
            "scales": (torch.rand(of_groups, generator=random) + 0.1).half(),
        }
    if kind == "zeros":
        tensors["zeros"] = torch.randint(0, 16, of_groups, dtype=torch.uint8, generator=random)
    meaning = _unpack(kind, tensors).dequantize()
    return {f"{name}.{slot}": tensor for slot, tensor in tensors.items()}, meaning
