"""GGUF's weight format: blocks of llama.cpp's types into grouped weights, number by number.

Implements `WeightFormat`. A rank reads the rows and blocks that it keeps as bytes, [O, blocks *
block_bytes]. Numbers with minima are from 0; others are moved so that half of the range is zero.
Where the converter has reordered the rows of Q and K, whole rows are put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import CheckpointWeight, GroupedWeight
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.formats.packed_groups import check_slice_bounds
from nanocore.worker.loading.gguf.architectures import (
    ARCHITECTURES,
    BLOCKS,
    architecture_name,
    gguf_tensors,
)
from nanocore.worker.loading.gguf.gguf_config import config_settings
from nanocore.worker.loading.gguf.gguf_files import read_headers
from nanocore.worker.loading.gguf.header import FLOATS, TensorType
from nanocore.worker.loading.weights import (
    CheckpointProjection,
    Entries,
    Projection,
    Slot,
    in_tiles,
    is_finite,
)

_IN_PAIRS: Final = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj(\.bias)?")


class GgufFormat:
    """Weight format of one GGUF model.

    head_dim: of Q and K. dtype: of the model's floats.

    Raises ModelFileError: see `gguf_tensors`.
    """

    name = "gguf"

    def __init__(self, first: Path, head_dim: int, dtype: torch.dtype) -> None:
        self._first = first
        self._head_dim = head_dim
        self._dtype = dtype
        self._has_pairs = ARCHITECTURES[architecture_name(read_headers(first)[0])].has_pairs
        self._tensors = {
            tensor.name.rpartition(".")[0]: tensor
            for tensor in gguf_tensors(first)
            if not tensor.name.endswith(".bias")
        }

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        name, shape = kept.name, kept.shape
        tensor = self._tensors.get(name)
        is_in_pairs = self._has_pairs and _IN_PAIRS.fullmatch(name) is not None
        if tensor is None or (tensor.type.name in FLOATS and not is_in_pairs):
            return None
        kind, where = tensor.type, f"{tensor.path}: {tensor.source}"
        in_halves = partial(_in_halves, head_dim=self._head_dim)
        if kind.name in FLOATS:
            slot = Slot(shape, self._dtype, (kept.rows, kept.columns), is_exact=False)
            return CheckpointProjection(
                {"weight": slot}, lambda slots: in_halves(slots["weight"]), is_float=True
            )
        if kind.name not in SERVED_TYPES:
            raise ModelFileError(
                f"{where} is stored as {kind.name}, which is not served; known: "
                f"{', '.join((*SERVED_TYPES, *FLOATS))}: take another file of this model, for "
                "example its Q4_K_M"
            )
        if shape[1] % kind.block_numel:
            raise ModelFileError(
                f"{where} is {kind.name} and has {shape[1]} inputs by the file's settings, which "
                f"is not a multiple of {kind.block_numel}: they are not of one model"
            )
        row_bytes, kept_bytes = (
            size // kind.block_numel * kind.block_bytes for size in (shape[1], kept.num_columns)
        )
        index = (kept.rows, in_tiles(_bytes_of(kept, kind), row_bytes, kept.num_tiles))

        def unpack(slots: Mapping[str, Tensor]) -> CheckpointWeight:
            blocks = slots[BLOCKS]
            weight = unpack_blocks(kind, in_halves(blocks) if is_in_pairs else blocks)
            if not all(is_finite(scales) for scales in weight.float_scales):
                raise ModelFileError(
                    f"{where} has NaN or infinity in its scales: download the model again"
                )
            return weight

        slot = Slot((shape[0], row_bytes), torch.uint8, index)
        # Numbers of five and six bits become bytes, and some scales wider.
        one_row = unpack_blocks(kind, torch.zeros(1, kept_bytes, dtype=torch.uint8))
        num_bytes = kept.num_rows * one_row.nbytes
        return CheckpointProjection({BLOCKS: slot}, unpack, kept_bytes=num_bytes)


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose pairs are side by side, as those whose pairs are half a head apart; a
    rank keeps whole heads."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def put_biases_back(first: Path, entries: Entries) -> None:
    """Bring loaded biases of Q and K from llama.cpp's order into ours, where it has another."""
    if not ARCHITECTURES[architecture_name(read_headers(first)[0])].has_pairs:
        return
    biases = [
        entry
        for name, entry in entries.items()
        if name.endswith(".bias") and _IN_PAIRS.fullmatch(name) is not None
    ]
    head_dim = config_settings(first).values["head_dim"] if biases else 0
    for entry in biases:
        for part in entry.parts:
            part.target.copy_(_in_halves(part.target, head_dim))


def _bytes_of(kept: Projection, kind: TensorType) -> slice:
    size, columns = kind.block_numel, kept.columns
    check_slice_bounds(kept, size, f"blocks of {size} inputs ({kind.name})")
    start, stop = (x // size * kind.block_bytes for x in (columns.start, columns.stop))
    return slice(start, stop)


_GROUP: Final = 32
_NONLINEAR: Final = (
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
)  # fmt: skip
_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_blocks(kind: TensorType, rows: Tensor) -> GroupedWeight:
    """The weight whose rows these bytes are; kind: one of `SERVED_TYPES`."""
    num_rows, num_bytes = rows.shape
    blocks = rows.view(num_rows, num_bytes // kind.block_bytes, kind.block_bytes)
    return _UNPACK[kind.name](blocks)


def _plain(
    blocks: Tensor, *, has_minimum: bool = False, has_fifth_bits: bool = False
) -> GroupedWeight:
    """Q4 and Q5: a scale, a minimum of _1, the fifth bits of Q5, and four bits of each value."""
    values, bits, minimum_OG = _nibbles(blocks[..., -16:]), 4, None
    if has_minimum:
        minimum_OG = -_halves(blocks, 2).float()
    if has_fifth_bits:
        fifth = (blocks[..., -20:-16].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        values, bits = values + (fifth << 4).flatten(1), 8
        if not has_minimum:
            values += 128 - 16
    return GroupedWeight(values, bits, _GROUP, _halves(blocks, 0), minimum_OG=minimum_OG)


def _q8_0(blocks: Tensor) -> GroupedWeight:
    values = (blocks[..., 2:] ^ 0x80).flatten(1)
    return GroupedWeight(values, 8, _GROUP, _halves(blocks, 0))


def _with_super_scales(blocks: Tensor, *, has_fifth_bits: bool = False) -> GroupedWeight:
    """Q4_K and Q5_K: eight scales and eight minima of six bits, in twelve bytes."""
    low_scale, low_minimum, both = blocks[..., 4:16].split(4, dim=-1)
    scale = torch.cat((low_scale & 63, (both & 15) | (low_scale >> 6 << 4)), dim=-1)
    minimum = torch.cat((low_minimum & 63, (both >> 4) | (low_minimum >> 6 << 4)), dim=-1)
    values, bits = _nibbles(blocks[..., -128:], 32), 4
    if has_fifth_bits:
        shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
        fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1
        values, bits = values + (fifth << 4).flatten(1), 8
    return GroupedWeight(
        values,
        bits,
        _GROUP,
        scale.view(torch.int8).flatten(1),
        minimum_OG=minimum.flatten(1),
        super_scale_OS=_halves(blocks, 0),
        super_minimum_OS=_halves(blocks, 2),
    )


def _q6_k(blocks: Tensor) -> GroupedWeight:
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (((high >> shifts) & 3) << 4).flatten(1)
    return GroupedWeight(
        _nibbles(blocks[..., :128], 64) + high + (128 - 32),
        8,
        16,
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
        super_scale_OS=_halves(blocks, 208),
    )


def _iq4_nl(blocks: Tensor) -> GroupedWeight:
    return _with_codebook(_nibbles(blocks[..., 2:]), _halves(blocks, 0), _NONLINEAR)


def _iq4_xs(blocks: Tensor) -> GroupedWeight:
    """Six bits of scale for each 32 values: four in nibbles, and two of a 16-bit number."""
    high = blocks[..., 2:4].contiguous().view(torch.int16).int()
    high = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    low = _nibbles(blocks[..., 4:8], 1).view(high.shape)
    scale = _halves(blocks, 0).float().unsqueeze(-1) * ((high << 4) + low - 32)
    return _with_codebook(_nibbles(blocks[..., 8:]), scale.flatten(1), _NONLINEAR)


def _mxfp4(blocks: Tensor) -> GroupedWeight:
    """Scales are powers of two; the codebook has twice the numbers."""
    exponent = blocks[..., 0].int() - 128
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    return _with_codebook(_nibbles(blocks[..., 1:]), scale, _E2M1)


_UNPACK: Final[dict[str, Callable[[Tensor], GroupedWeight]]] = {
    "Q4_0": _plain,
    "Q4_1": partial(_plain, has_minimum=True),
    "Q5_0": partial(_plain, has_fifth_bits=True),
    "Q5_1": partial(_plain, has_minimum=True, has_fifth_bits=True),
    "Q8_0": _q8_0,
    "Q4_K": _with_super_scales,
    "Q5_K": partial(_with_super_scales, has_fifth_bits=True),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

SERVED_TYPES: Final = tuple(_UNPACK)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at this byte of each block, [O, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor, size: int = 16) -> Tensor:
    """Low halves and then high ones, of each `size` bytes; [O, values]."""
    packed = packed.unflatten(-1, (-1, size))
    return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)


def _with_codebook(values: Tensor, scale: Tensor, codebook: tuple[int, ...]) -> GroupedWeight:
    numbers = torch.tensor(codebook, dtype=torch.float32)
    return GroupedWeight(values, 4, _GROUP, scale, codebook=numbers)
