"""compressed-tensors, as llm-compressor writes it: groups of modules, each with its own scheme.

Schemes: four or eight bits in words, int8, or E4M3. Signed numbers are stored with half of their
range added where they are packed, and zero points too: w = scale * (q - zero). What the file says
of activations is not used: kernels choose their scales themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.formats.fp8 import BLOCK, Float8Layout, Scales, input_scale_slot
from nanocore.worker.loading.formats.gptq import sort_inputs
from nanocore.worker.loading.formats.packed_groups import (
    Grouping,
    check_slice_bounds,
    groups_of_slice,
    per_word,
    unpack_words,
    words,
    zeros_or_none,
)
from nanocore.worker.loading.formats.patterns import NameList
from nanocore.worker.loading.formats.quantization_config import (
    CheckpointTensors,
    aliases,
    group_size,
    groups_in_words,
    refuse_if_set,
    refuse_unless,
)
from nanocore.worker.loading.weights import EMBEDDING, CheckpointProjection, Projection, Slot

_LINEAR: Final = "Linear"
_MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules with one scheme. is_general: all linear layers, which no other group names."""

    targets: NameList
    is_general: bool
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """A `WeightFormat`."""

    groups: tuple[_Group, ...]
    stored: CheckpointTensors
    name: str = "compressed-tensors"

    @classmethod
    def read(cls, settings: Settings, stored: CheckpointTensors) -> CompressedTensorsFormat:
        refuse_unless(settings, "quantization_status", str, ("compressed", "frozen"))
        refuse_if_set(settings, "kv_cache_scheme", "transform_config", "moe_sparsity_config")
        sparsity = settings.section("sparsity_config")
        refuse_unless(sparsity, "format", str, ("dense",))
        config_groups = settings.section("config_groups")
        if not config_groups.values:
            raise settings.error("config_groups", "names no group of modules")
        if len(config_groups.values) > _MAX_GROUPS:
            raise ModelFileError(
                f"{settings.source}: config_groups has {len(config_groups.values)} groups; "
                f"{_MAX_GROUPS} are read"
            )
        default = settings.values.get("format")
        return cls(
            tuple(_read_group(config_groups, name, default) for name in config_groups.values),
            stored,
        )

    def __str__(self) -> str:
        return f"compressed-tensors: {'; '.join(str(group.scheme) for group in self.groups)}"

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        name = kept.name
        scheme = self._scheme_of(name)
        if scheme is None:
            if any(self.stored.has(f"{name}.{end}") for end in ("weight_packed", "weight_scale")):
                raise ModelFileError(
                    f"{name} is quantized in the files, but in no group of quantization_config's "
                    "config_groups"
                )
            return None
        return scheme.projection(kept, self.stored)

    def _scheme_of(self, name: str) -> Scheme | None:
        # A group that names the module goes before one of all linear layers, as in vLLM.
        all_names = aliases(name)
        named = [g for g in self.groups if any(alias in g.targets for alias in all_names)]
        general = [group for group in self.groups if group.is_general]
        for group in named if f"{name}.weight" == EMBEDDING else named + general:
            is_stored = self.stored.has(f"{name}.{group.scheme.marker}")
            return group.scheme if is_stored else None
        return None


def _read_group(groups: Settings, name: str, default_format: Any) -> _Group:
    group = groups.section(name)
    targets = group.get("targets", list[str], [])
    own_format = group.values.get("format") or default_format
    scheme = _read_scheme(group.with_values(group.values | {"format": own_format}))
    listed = NameList(f"{group.source}: {group.name}.targets", targets)
    return _Group(listed, _LINEAR in targets, scheme)


PACKED, INTEGERS, FLOATS, NAIVE = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
_FLOAT_STRATEGIES: Final[tuple[Scales, ...]] = ("tensor", "channel", "block")


def _read_scheme(group: Settings) -> Scheme:
    """Read the scheme of a group of `config_groups`.

    Raises ModelFileError: something that is not served.
    """
    stored_as = refuse_unless(
        group, "format", str, (PACKED, INTEGERS, FLOATS, NAIVE), required=True
    )
    refuse_if_set(group, "output_activations")
    weights, inputs = group.section("weights"), group.section("input_activations")
    if not weights.values:
        raise group.error("weights", "must say how weights are quantized")
    kind = refuse_unless(weights, "type", str, ("int", "float"))
    if (kind == "float") != (stored_as == FLOATS) and stored_as != NAIVE:
        raise weights.error("type", f"is not what the format {stored_as} holds")
    bits = refuse_unless(weights, "num_bits", int, (8, 4) if kind == "int" else (8,), required=True)
    is_static = bool(inputs.values) and not inputs.get("dynamic", bool, False)
    if kind == "float":
        return _read_float8(weights, has_input_scale=is_static)
    strategy = refuse_unless(weights, "strategy", str, ("tensor", "channel", "group"))
    if strategy == "tensor" and stored_as == PACKED:
        raise weights.error("strategy", "is not served with pack-quantized: channel or group is")
    return _Integers(
        packing="words" if stored_as == PACKED else "bytes",
        bits=bits,
        strategy="tensor" if strategy == "tensor" else "group",
        group_size=group_size(weights) if strategy == "group" else -1,
        is_symmetric=weights.get("symmetric", bool, True),
        sorts_inputs=weights.values.get("actorder") in ("group", True),
        has_input_scale=is_static,
        has_input_zero=is_static and not inputs.get("symmetric", bool, True),
    )


def _read_float8(weights: Settings, *, has_input_scale: bool) -> Float8Layout:
    strategy = refuse_unless(weights, "strategy", str, _FLOAT_STRATEGIES)
    if not weights.get("symmetric", bool, True):
        raise weights.error("symmetric", "is not served for floats: true is")
    block = weights.get("block_structure", list[int], [])
    if strategy == "block" and block != [BLOCK, BLOCK]:
        raise weights.error("block_structure", f"is not served: [{BLOCK}, {BLOCK}] is")
    scales = next(known for known in _FLOAT_STRATEGIES if known == strategy)
    return Float8Layout(scales, "weight_scale", has_input_scale)


@dataclass(frozen=True, slots=True)
class _Integers:
    """pack-quantized ("words") and int-quantized ("bytes").

    strategy: "tensor": one scale for the whole weight. group_size: -1: one for each output.
    marker: a tensor that only a module stored so has.
    """

    packing: Literal["words", "bytes"]
    bits: int
    strategy: Literal["tensor", "group"]
    group_size: int
    is_symmetric: bool
    sorts_inputs: bool
    has_input_scale: bool
    has_input_zero: bool

    @property
    def marker(self) -> str:
        return "weight_packed" if self.packing == "words" else "weight_scale"

    def __str__(self) -> str:
        of = (
            "a scale for each weight"
            if self.strategy == "tensor"
            else groups_in_words(self.group_size)
        )
        static = "; its input_scale is not used" if self.has_input_scale else ""
        return f"{self.bits} bits, {of}{static}"

    def projection(self, kept: Projection, stored: CheckpointTensors) -> CheckpointProjection:
        name, in_features = kept.name, kept.shape[1]
        groups = groups_of_slice(kept, self.group_size)
        # Files of modules whose inputs were left in their order have none.
        has_g_idx = self.sorts_inputs and "weight_g_idx" in stored.ends
        if has_g_idx:
            check_slice_bounds(kept, in_features, "groups of any order (actorder)")
        slots = self._value_slots(kept) | self._scale_slots(kept, groups, stored)
        if has_g_idx:
            slots["weight_g_idx"] = Slot((in_features,), torch.int32, (kept.columns,))
        if self.has_input_scale:
            slots["input_scale"] = input_scale_slot(name, stored)
        if self.has_input_zero and stored.has(f"{name}.input_zero_point"):
            zero_shape = stored.shape(f"{name}.input_zero_point", (1,), ())
            slots["input_zero_point"] = Slot(zero_shape, torch.int8, ())
        return CheckpointProjection(slots, partial(self._unpack, kept, groups))

    def _value_slots(self, kept: Projection) -> dict[str, Slot]:
        out_features, in_features = kept.shape
        if self.packing == "bytes":
            return {"weight": Slot(kept.shape, torch.int8, (kept.rows, kept.columns))}
        packed = per_word(self.bits)
        check_slice_bounds(kept, packed, f"words of {packed} inputs")
        num_words = -(-in_features // packed)
        return {
            "weight_packed": Slot(
                (out_features, num_words), torch.int32, (kept.rows, words(kept.columns, packed)[0])
            ),
            "weight_shape": Slot((2,), torch.int64, (slice(0, 2),)),
        }

    def _scale_slots(
        self, kept: Projection, groups: Grouping, stored: CheckpointTensors
    ) -> dict[str, Slot]:
        name, out_features = kept.name, kept.shape[0]
        dtype = stored.float_dtype(f"{name}.weight_scale", torch.bfloat16)
        if self.strategy == "tensor":
            of_scale = Slot(stored.shape(f"{name}.weight_scale", (1,), ()), dtype, ())
            of_zero = Slot(stored.shape(f"{name}.weight_zero_point", (1,), ()), torch.int8, ())
        else:
            of_scale = Slot((out_features, groups.count), dtype, (kept.rows, groups.kept))
            of_zero = Slot((out_features, groups.count), torch.int8, (kept.rows, groups.kept))
        if self.packing == "words":
            packed = per_word(self.bits)
            num_words = -(-out_features // packed)
            index = (words(kept.rows, packed)[0], groups.kept)
            if not (self.is_symmetric and stored.dtype(f"{name}.weight_zero_point") == "I8"):
                of_zero = Slot((num_words, groups.count), torch.int32, index)
        slots = {"weight_scale": of_scale}
        # Some versions write zero points of symmetric weights, too.
        if not self.is_symmetric or stored.has(f"{name}.weight_zero_point"):
            slots["weight_zero_point"] = of_zero
        return slots

    def _unpack(
        self, kept: Projection, groups: Grouping, tensors: Mapping[str, Tensor]
    ) -> GroupedWeight:
        name, shape = kept.name, kept.shape
        if self.packing == "words":
            said = tuple(tensors["weight_shape"].tolist())
            if said != shape:
                raise ModelFileError(
                    f"{name}.weight_shape says {list(said)}, and config.json implies {list(shape)}"
                )
            values_OI = unpack_words(tensors["weight_packed"], self.bits)[:, : kept.num_columns]
        else:
            values_OI = self._unsigned(name, tensors["weight"])
        scale_OG = tensors["weight_scale"].reshape(
            -1, 1 if self.strategy == "tensor" else groups.kept.stop - groups.kept.start
        )
        weight = GroupedWeight(
            values_OI.contiguous(),
            self.bits,
            groups.size,
            scale_OG.expand(kept.num_rows, -1).contiguous(),
            self._zeros(kept, tensors),
        )
        g_idx = tensors.get("weight_g_idx")
        if g_idx is None or bool((g_idx == -1).all()):  # which stands for inputs in their order
            return weight
        return sort_inputs(name, weight, g_idx, kept.columns)

    def _zeros(self, kept: Projection, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if "weight_zero_point" not in tensors:
            return None
        name, zeros = kept.name, tensors["weight_zero_point"]
        if zeros.dtype == torch.int32:
            in_words = words(kept.rows, per_word(self.bits))[1]
            zero_OG = unpack_words(zeros.t(), self.bits).t()[in_words]
        else:
            zero_OG = self._unsigned(f"{name}.weight_zero_point", zeros)
            if self.strategy == "tensor":
                zero_OG = zero_OG.reshape(1, 1).expand(kept.num_rows, 1)
        found = zeros_or_none(zero_OG, self.bits)
        if self.is_symmetric and found is not None:
            raise ModelFileError(
                f"{name}.weight_zero_point has zero points other than 0, and quantization_config "
                "says symmetric = true: it is not of this model"
            )
        return found

    def _unsigned(self, name: str, signed: Tensor) -> Tensor:
        """int8 to uint8, with half of the range of `bits` added."""
        if self.bits == 8:
            return signed.view(torch.uint8) ^ 128
        if bool((signed < -8).any() | (signed > 7).any()):
            raise ModelFileError(f"{name} has numbers of more than {self.bits} bits")
        return (signed + 8).view(torch.uint8)


Scheme = _Integers | Float8Layout
"""One way to store a weight."""
