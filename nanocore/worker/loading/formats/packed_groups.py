"""Numbers in groups and in 32-bit words, and which of both a rank's slice of a weight lies in.

Numbers of 4 and 8 bits are packed with the lowest bits first. Words are unpacked byte by byte,
which takes at most twice the numbers' memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.loading.weights import Projection

MIN_GROUP: Final = 16
"""Smaller groups are in no checkpoint that we know, and kernels do not take them."""
_MAX_SIZES: Final = 8


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of a weight's inputs.

    size: inputs of one; those of a slice, if all have one scale. count: in the whole weight.
    kept: which of these the slice has.
    """

    size: int
    count: int
    kept: slice


def groups_of_slice(kept: Projection, group_size: int) -> Grouping:
    """The groups of a slice. group_size: as formats have it, -1 for all inputs in one.

    Raises ConfigError: the slice cuts through a group. ModelFileError: no weight has such groups.
    """
    in_features = kept.shape[1]
    if group_size == -1 or group_size >= in_features:
        return Grouping(kept.num_columns, 1, slice(0, 1))
    if in_features % group_size:
        raise ModelFileError(
            f"{kept.name} has {in_features} inputs, which is not a multiple of group_size = "
            f"{group_size}"
        )
    check_slice_bounds(kept, group_size, f"groups of {group_size} inputs")
    groups = slice(kept.columns.start // group_size, kept.columns.stop // group_size)
    return Grouping(group_size, in_features // group_size, groups)


def check_slice_bounds(kept: Projection, multiple: int, what: str) -> None:
    """Raises ConfigError: the slice does not begin and end at multiples, or at the end."""
    in_features, ends = kept.shape[1], (kept.columns.start, kept.columns.stop)
    if all(end % multiple == 0 or end == in_features for end in ends):
        return
    size = in_features // kept.num_columns
    num_groups = max(1, in_features // kept.num_tiles // multiple)
    fit = [str(n) for n in range(1, min(num_groups, 1024) + 1) if num_groups % n == 0]
    raise ConfigError(
        f"--tensor-parallel-size {size}: the {in_features} inputs of {kept.name} are stored in "
        f"{what}, which ranks cannot share; sizes that fit this layer: "
        f"{', '.join(fit[:_MAX_SIZES])}"
    )


def words(part: slice, per_word: int) -> tuple[slice, slice]:
    """(the words that hold these numbers, which of the numbers in those words they are)."""
    first, last = part.start // per_word, -(-part.stop // per_word)
    skipped = first * per_word
    return slice(first, last), slice(part.start - skipped, part.stop - skipped)


def per_word(bits: int) -> int:
    """Numbers of this many bits in a 32-bit word."""
    return 32 // bits


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., W] to uint8 [..., W * per word], each word's numbers in the order of its bits."""
    as_bytes = compact(packed).view(torch.uint8)
    if bits == 8:
        return as_bytes
    halves = as_bytes.to(torch.int16)  # each becomes two bytes, of its low and its high four bits
    return (halves << 4).bitwise_or_(halves).bitwise_and_(0x0F0F).view(torch.uint8)


def compact(tensor: Tensor) -> Tensor:
    """The same with its last dimension's numbers side by side, as views of bytes want them.

    That of one number may have any stride, and counts as contiguous.
    """
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def zeros_or_none(zero_OG: Tensor, bits: int) -> Tensor | None:
    """Zero points, contiguous; None if all are half of the range."""
    return None if bool((zero_OG == 1 << (bits - 1)).all()) else zero_OG.contiguous()
