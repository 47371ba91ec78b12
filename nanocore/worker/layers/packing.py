"""A weight's two states: as a checkpoint stores it, and then what the kernel backend packed.

Layers say of which projections a weight is (`entries`); the checkpoint's format says how those are
stored. Memory for what is stored is taken when its reading begins, and is gone when all is
there and the backend has packed it: only a few weights are both at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.group_quantization import LARGEST, SMALLEST, packed_bytes
from nanocore.kernels.grouped_weight import CheckpointWeight, QuantizedForm, join_adjacent
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import FP8, Experts, ExpertWeights, LinearWeight, in_segments
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.weights import (
    Buffer,
    CheckpointProjection,
    Entries,
    LoadedSlice,
    Projection,
    TensorEntry,
)
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization


class MetaWeight(msgspec.Struct, frozen=True):
    """Stand-in for a quantized weight whose values are not known: its shape, form and size."""

    out_features: int
    in_features: int
    form: QuantizedForm
    num_bytes: int


Weights = list[CheckpointWeight | MetaWeight]
"""Rows of one weight, one after the other; whoever packs them takes them out."""
Pack = Callable[[Weights], LinearWeight]
"""One of `WeightPacker`'s methods."""


class _Run(msgspec.Struct, frozen=True):
    """Neighbouring rows of a weight. shape: theirs. buffers: by the names of slots.

    stored: how to read them; None for floats, which are in one buffer as they are.
    """

    shape: tuple[int, int]
    buffers: dict[str, Buffer]
    stored: CheckpointProjection | None = None

    def unpack(self) -> CheckpointWeight:
        tensors = {name: buffer.take() for name, buffer in self.buffers.items()}
        return tensors["weight"] if self.stored is None else self.stored.unpack(tensors)


class Weight:
    """A layer's weight [O, I], of one projection or of several whose rows are stacked.

    Implements `BufferOwner`. It is packed once it is filled and `pack` was called, whichever is
    last. On the meta device it is never filled, and packed at once.

    Raises ModelFileError: no memory could hold it.
    """

    def __init__(self, placement: Placement, out_features: int, in_features: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self._placement = placement
        placement.check_size(out_features, in_features)
        self._runs: list[_Run] = []
        self._pack: Pack | None = None
        self._is_filled = placement.device.type == "meta"
        self._packed: LinearWeight | None = None

    @property
    def packed(self) -> LinearWeight:
        assert self._packed is not None, "this weight is not packed yet"
        return self._packed

    def entries(self, *projections: Projection) -> Entries:
        """Map the tensors of these projections, whose rows are the weight's, to its buffers.

        Raises ModelFileError, ConfigError: see `WeightFormat.projection`.
        """
        assert self._packed is None, "this weight is packed, and filled no more"
        assert sum(projection.num_rows for projection in projections) == self.out_features
        self._runs, entries = [], Entries()
        weight_format = self._placement.weight_format
        stored = [
            (one, None if weight_format is None else weight_format.projection(one))
            for one in projections
        ]
        for is_plain, neighbours in groupby(stored, lambda pair: pair[1] is None):
            if is_plain:
                found = self._floats([projection for projection, _ in neighbours])
            else:
                found = (pair for one in neighbours for pair in self._slots(*one))
            for name, entry in found:
                if name in entries:  # Q, K and V that are one tensor
                    entry = replace(entry, parts=entries[name].parts + entry.parts)
                entries[name] = entry
        return entries

    def pack(self, pack: Pack) -> None:
        """Have it packed so; once."""
        assert self._pack is None, "this weight is packed, and filled no more"
        self._pack = pack
        self._pack_if_filled()

    def filled(self) -> None:
        self._is_filled = True
        self._pack_if_filled()

    def _pack_if_filled(self) -> None:
        if self._pack is None or not self._is_filled:
            return
        assert self._runs, "entries are asked for before a weight is packed"
        # Let go of the runs: their buffers are to be gone when the packed weight is there.
        runs, self._runs = self._runs, []
        is_outline = self._placement.device.type == "meta"
        self._packed = self._pack(
            [self._outline(run) if is_outline else run.unpack() for run in runs]
        )

    def _floats(self, projections: list[Projection]) -> Iterator[tuple[str, TensorEntry]]:
        # In one buffer, so that they need not be joined.
        sizes = [projection.num_rows for projection in projections]
        buffer = self._buffer((sum(sizes), self.in_features), self._placement.dtype)
        self._runs.append(_Run((sum(sizes), self.in_features), {"weight": buffer}))
        for projection, target in zip(projections, buffer.outline.split(sizes), strict=True):
            part = LoadedSlice(target, projection.index, buffer)
            yield f"{projection.name}.weight", TensorEntry(projection.shape, [part])

    def _slots(
        self, projection: Projection, stored: CheckpointProjection | None
    ) -> Iterator[tuple[str, TensorEntry]]:
        assert stored is not None
        buffers = {}
        for name, slot in stored.slots.items():
            whole = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
            buffers[name] = self._buffer(tuple(whole[slot.index].shape), slot.dtype)
        shape = (projection.num_rows, self.in_features)
        self._runs.append(_Run(shape, buffers, stored))
        num_params = projection.shape[0] * projection.shape[1]  # of all slots together
        for name, slot in stored.slots.items():
            part = LoadedSlice(buffers[name].outline, slot.index, buffers[name])
            dtype = slot.dtype if slot.is_exact else None
            entry = TensorEntry(slot.shape, [part], dtype=dtype, num_params=num_params)
            yield f"{projection.name}.{name}", entry
            num_params = 0

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        outline = torch.empty(shape, dtype=dtype, device="meta")
        return Buffer(self, outline, self._placement.device)

    def _outline(self, run: _Run) -> CheckpointWeight | MetaWeight:
        if run.stored is None or run.stored.is_float:
            return torch.empty(run.shape, dtype=self._placement.dtype, device="meta")
        outlines = [buffer.outline for buffer in run.buffers.values()]
        num_bytes = run.stored.kept_bytes or sum(outline.nbytes for outline in outlines)
        is_float8 = any(o.dtype == FP8 and o.shape == run.shape for o in outlines)
        return MetaWeight(*run.shape, "float8" if is_float8 else "grouped", num_bytes)


class WeightPacker:
    """Packs weights for a backend.

    dtype: of activations. kept_forms, stacks_experts: see `Kernels`; for outlines, which other
    kernels are to pack. num_bytes, num_params: of all weights so far. expert_bytes, expert_params:
    of those the experts'.
    """

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        kept_forms: frozenset[QuantizedForm] = frozenset(),
        stacks_experts: bool | None = None,
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._quantization = quantization
        self._kept_forms = kept_forms
        self._stacks_experts = kernels.stacks_experts if stacks_experts is None else stacks_experts
        self.num_bytes = self.num_params = self.expert_bytes = self.expert_params = 0

    def linear(self, weights: Weights) -> LinearWeight:
        """The weight of a linear layer, whose rows are those of all; the caller gives them up."""
        return self._pack(weights, self._quantization)

    def attention(self, num_kept: int, weights: Weights) -> LinearWeight:
        """Pack Q, K and V as one weight, of which the last num_kept rows are K and V.

        These have eight bits where others have four: they are a small part of a model, and of
        what four bits change more than a third is in them (docs/models.md).
        """
        if self._quantization != "int4":
            return self.linear(weights)
        kept: Weights = []
        while num_kept and weights and isinstance(weights[-1], Tensor):
            last_OI = weights.pop()
            assert isinstance(last_OI, Tensor)
            size = min(num_kept, len(last_OI))
            kept.insert(0, last_OI[-size:])
            if len(last_OI) > size:
                weights.append(last_OI[:-size])
            num_kept -= size
        segments = [self._pack(weights, "int4")] if weights else []
        segments += [self._pack(kept, "int8")] if kept else []
        return in_segments(segments)

    def head(self, weights: Weights) -> LinearWeight:
        """Pack the head: fp8 and four bits are for the layers between."""
        return self._pack(weights, "int8" if self._quantization in ("int4", "int8") else None)

    def embedding(self, weights: Weights) -> LinearWeight:
        """Pack an embedding that is not the head."""
        return self._pack(weights, "int8" if self._quantization == "int4" else None)

    def rounded(self, weights: Weights) -> LinearWeight:
        """Pack with eight bits whatever others have."""
        return self._pack(weights, "int8")

    def unquantized(self, weights: Weights) -> LinearWeight:
        return self._pack(weights, None)

    def expert(self, weights: Weights) -> LinearWeight:
        if self._stacks_experts:
            # One after the other, so that each is gone when its floats are there.
            floats: Weights = [self._floats(weights.pop(0)) for _ in range(len(weights))]
            packed = self._pack(floats, None)
        else:
            packed = self.linear(weights)
        self.expert_bytes += packed.num_bytes
        self.expert_params += packed.out_features * packed.in_features
        return packed

    def experts(self, weights: ExpertWeights) -> Experts:
        """All of a layer's, of which the caller gives up what `expert` made.

        Raises ModelFileError: some are stored unlike the others.
        """
        try:
            return self._kernels.pack_experts(weights)
        except ValueError as error:
            raise ModelFileError(
                f"{error}, and {self._kernels.name} kernels take those of one; use "
                "--attention-backend torch, or a checkpoint whose experts are alike"
            ) from None

    def _floats(self, weight: CheckpointWeight | MetaWeight) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        if isinstance(weight, MetaWeight):
            shape = (weight.out_features, weight.in_features)
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return weight.dequantize().to(self._dtype)

    def _pack(self, weights: Weights, quantization: Quantization | None) -> LinearWeight:
        outlines = [weight for weight in weights if isinstance(weight, MetaWeight)]
        segments = [self._pack_outline(outline) for outline in outlines]
        joined = join_adjacent([w for w in weights if not isinstance(w, MetaWeight)])
        weights.clear()  # so that each is gone when it is packed
        while joined:
            segments.append(self._pack_one(joined.pop(0), quantization))
        packed = in_segments(segments)
        self.num_bytes += packed.num_bytes
        self.num_params += packed.out_features * packed.in_features
        return packed

    def _pack_one(
        self, weight: CheckpointWeight, quantization: Quantization | None
    ) -> LinearWeight:
        if not isinstance(weight, Tensor):
            return self._kernels.pack_linear(weight, None, self._dtype)
        if weight.is_meta and quantization == "int4":
            rows, columns = weight.shape
            num_bytes = packed_bytes(rows, columns)
            return self._pack_outline(MetaWeight(rows, columns, "grouped", num_bytes))
        if quantization in ("int4", "int8") and weight.numel() and not weight.is_meta:
            largest = max(abs(end.item()) for end in weight.aminmax())
            if LARGEST < largest < math.inf or 0 < largest < SMALLEST:
                raise ModelFileError(
                    f"the largest number of a weight of shape {list(weight.shape)} is {largest:g}: "
                    f"--quantization {quantization} takes {SMALLEST:g} to {LARGEST:g}, because its "
                    "scales are float16; use no quantization"
                )
        return self._kernels.pack_linear(weight, quantization, self._dtype)

    def _pack_outline(self, outline: MetaWeight) -> LinearWeight:
        num_bytes = outline.out_features * outline.in_features * self._dtype.itemsize
        if outline.form in self._kept_forms:
            num_bytes = outline.num_bytes
        data = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        return LinearWeight(outline.out_features, outline.in_features, data.dtype, data)
