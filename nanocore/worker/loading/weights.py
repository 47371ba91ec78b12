"""The contracts of loading: where a checkpoint's tensors go, and how it stores linear layers.

A model names every tensor its checkpoint must hold, with its whole shape, and says which slices of
it this rank keeps and where. The loader reads those slices and nothing else, and notifies their
owner when they are complete. A layer asks the checkpoint's `WeightFormat`, for each projection by
name, for the slots that hold this rank's slice, and has them unpacked once they are filled: formats
know nothing of layers, and layers nothing of packings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.grouped_weight import CheckpointWeight

Index = tuple[slice, ...]
"""Along the leading dimensions, with explicit bounds; the rest is taken whole."""


class BufferOwner(Protocol):
    """Owner of buffers that tensors are read into."""

    def filled(self) -> None:
        """All parts in all its buffers are read; from the thread that called the loader."""


class Buffer:
    """Memory that tensors of a checkpoint are read into, and that is there only until it is used.

    outline: what it is to be, on the meta device. device: where.
    """

    def __init__(self, owner: BufferOwner, outline: Tensor, device: torch.device) -> None:
        self.owner = owner
        self.outline = outline
        self._device = device
        self._memory: Tensor | None = None

    def view(self, of_outline: Tensor) -> Tensor:
        """The memory of a view of the outline; it is taken when it is first asked for."""
        if self._memory is None:
            self._memory = _memory(self.outline, self._device)
        return self._memory.as_strided(
            of_outline.size(), of_outline.stride(), of_outline.storage_offset()
        )

    def take(self) -> Tensor:
        """All of it, which is the caller's from now on."""
        memory = self.view(self.outline)
        self._memory = None
        return memory


def _memory(outline: Tensor, device: torch.device) -> Tensor:
    # numpy asks for large pages on a CPU: small ones take longer than reading.
    if device.type != "cpu":
        return torch.empty_like(outline, device=device)
    words = torch.from_numpy(np.empty(outline.nbytes, np.uint8))
    return words.view(outline.dtype).view(outline.shape)


class LoadedSlice(msgspec.Struct, frozen=True):
    """A slice of a checkpoint's tensor, and what it fills: a view of a parameter.

    buffer: if there is one, target is a view of its outline, and has no memory itself.
    """

    target: Tensor
    index: Index
    buffer: Buffer | None = None

    @property
    def owner(self) -> BufferOwner | None:
        return None if self.buffer is None else self.buffer.owner

    def memory(self) -> Tensor:
        return self.target if self.buffer is None else self.buffer.view(self.target)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint.

    shape: of the whole tensor. parts: what this rank keeps of it; empty if nothing.
    offset: added to what the file holds (Gemma stores norm weights less one).
    dtype: the one that it must have; None: any float, converted to the target's.
    num_params: numbers of the model that it stands for, where those are not its own.
    """

    shape: tuple[int, ...]
    parts: list[LoadedSlice] = msgspec.field(default_factory=list)
    offset: float = 0.0
    dtype: torch.dtype | None = None
    num_params: int | None = None

    @property
    def counted_params(self) -> int:
        return math.prod(self.shape) if self.num_params is None else self.num_params


Entries = dict[str, TensorEntry]
"""By checkpoint tensor name, in the order of the model."""


FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floats that are not quantized, by safetensors' names."""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
POSITIONS: Final = "model.embed_positions.weight"
MTP_PREFIX: Final = "mtp."
"""What names of an MTP head's tensors begin with."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integers by their bytes."""


def is_finite(values: Tensor) -> bool:
    """Whether no float is NaN or infinite: by the least and the greatest, which is fastest."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in values.aminmax())


def are_within(values: Tensor, limit: float) -> bool:
    """Whether all are between -limit and limit, by their bits, whose order is that of numbers.

    By numpy: torch would begin threads beside those that load, and take longer.
    """
    edge, size = torch.tensor(limit, dtype=values.dtype), values.itemsize
    last = int(edge.view(_BITS[size])) - (edge.item() > limit)  # it may have been rounded up
    bits = values.view(_BITS[size]).numpy()
    return bool(bits.max() <= last and bits.view(f"u{size}").max() <= last + (1 << 8 * size - 1))


TensorNames = Callable[[str], str | None]
"""From a checkpoint's name of a tensor to that in `Entries`; None if it is not to be read."""


def without_parts(entries: Entries) -> Entries:
    return {name: replace(entry, parts=[]) for name, entry in entries.items()}


def unbuffered_bytes(entries: Entries) -> int:
    """Memory of what stays as it is loaded: all that has no buffer."""
    parts = [part for entry in entries.values() for part in entry.parts]
    return sum(part.target.nbytes for part in parts if part.buffer is None)


def whole(target: Tensor, offset: float = 0.0) -> TensorEntry:
    """A tensor that every rank keeps whole, in target; offset: see `TensorEntry`."""
    return TensorEntry(tuple(target.shape), [LoadedSlice(target, ())], offset)


def transposed(entry: TensorEntry) -> TensorEntry:
    """The same matrix where a checkpoint holds it with rows and columns exchanged."""
    num_rows, num_columns = entry.shape
    parts = []
    for part in entry.parts:
        missing = (slice(0, num_rows), slice(0, num_columns))[len(part.index) :]
        index = (*part.index, *missing)[::-1]
        parts.append(replace(part, target=part.target.t(), index=index))
    return replace(entry, shape=(num_columns, num_rows), parts=parts)


class PendingOwners:
    """Counter of slices, or pieces of them, that each owner lacks; notifies it of the last."""

    def __init__(self, owners: Iterable[BufferOwner | None]) -> None:
        self._counts = Counter(owner for owner in owners if owner is not None)

    def count_filled(self, owner: BufferOwner | None) -> bool:
        """Count one as filled; True if it was the owner's last, and the owner was notified."""
        if owner is None:
            return False
        self._counts[owner] -= 1
        if self._counts[owner]:
            return False
        owner.filled()
        return True


class Projection(msgspec.Struct, frozen=True):
    """Slice that a rank keeps of a projection of the checkpoint.

    name: "model.layers.0.self_attn.q_proj"; floats are in `{name}.weight`. shape: of the whole
    weight, [O, I]. rows, columns: which are kept; of columns, in each of so many equal tiles.
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    columns: slice
    num_tiles: int = 1

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_columns(self) -> int:
        return self.num_tiles * (self.columns.stop - self.columns.start)

    @property
    def index(self) -> Index:
        return self.rows, in_tiles(self.columns, self.shape[1], self.num_tiles)


def in_tiles(kept: slice, size: int, num_tiles: int) -> Any:
    """Index of what is kept of each of num_tiles equal tiles, which have `size` together."""
    return kept if num_tiles == 1 else torch.arange(size).view(num_tiles, -1)[:, kept].flatten()


class Slot(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint, of which a rank keeps a slice as it is stored.

    shape: of the whole tensor. dtype: the one that it must have. index: what is kept.
    is_exact: False: the file may hold any float, which is converted to dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: Index
    is_exact: bool = True


class CheckpointProjection(msgspec.Struct, frozen=True):
    """One projection's slice in a checkpoint.

    slots: by the tensor's name after the projection's and a dot ("qweight", "scales", ...).
    unpack: what filled slots, by the same names, are a weight [rows, columns] of; it may keep them.
    is_float: that is a tensor of the model's dtype. kept_bytes: memory of the weight where kernels
    keep its numbers, if that is not the slots'.
    """

    slots: Mapping[str, Slot]
    unpack: Callable[[Mapping[str, Tensor]], CheckpointWeight]
    is_float: bool = False
    kept_bytes: int | None = None


class WeightFormat(Protocol):
    """One checkpoint's way to store weights."""

    @property
    def name(self) -> str:
        """Name in logs and errors: "awq", "gptq", "compressed-tensors", "fp8", "gguf"."""

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        """Find the slots of these rows and columns of a projection; None for floats.

        Raises:
            ModelFileError: it is stored in a way that is not served.
            ConfigError: the slice cuts through a group; says which sizes of tensor parallel fit.
        """
