"""GPTQ as AutoGPTQ and GPTQModel write it: four or eight bits, groups of inputs, zero points.

Values are [words, outputs], the inputs of a word in the order of its bits; zero points are [groups,
words of outputs]. Version 1 stores zero points less one. With desc_act inputs are in groups by
g_idx, in any order: the weight's columns are then sorted by it, and the permutation kept.
w = scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.formats.packed_groups import (
    check_slice_bounds,
    groups_of_slice,
    per_word,
    unpack_words,
    words,
    zeros_or_none,
)
from nanocore.worker.loading.formats.patterns import MAX_REGEXES, Pattern
from nanocore.worker.loading.formats.quantization_config import (
    CheckpointTensors,
    aliases,
    group_size,
    groups_in_words,
    refuse_if_set,
    refuse_unless,
)
from nanocore.worker.loading.weights import CheckpointProjection, Projection, Slot

_BITS: Final = (4, 8)
_FORMATS: Final = ("gptq", "gptq_v2")
_ONE_EACH: Final = {4: 0x11111111, 8: 0x01010101}
"""A one in each number of a word."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization scheme of a module."""

    bits: int
    group_size: int
    sorts_inputs: bool
    is_symmetric: bool

    @classmethod
    def read(cls, settings: Settings) -> _Scheme:
        bits = refuse_unless(settings, "bits", int, _BITS, required=True)
        desc_act, sym = settings.get("desc_act", bool, False), settings.get("sym", bool, True)
        return cls(bits, group_size(settings), desc_act, sym)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """A `WeightFormat`.

    dynamic: patterns of modules that are quantized in another way; the first counts.
    """

    scheme: _Scheme
    stores_zero_less_one: bool
    dynamic: tuple[tuple[Pattern, _Scheme], ...]
    stored: CheckpointTensors
    name: str = "gptq"

    @classmethod
    def read(cls, settings: Settings, stored: CheckpointTensors) -> GptqFormat:
        version = _version(settings)
        refuse_unless(settings, "pack_dtype", str, ("int32",))
        refuse_if_set(settings, "is_marlin_format", "adapter", "rotation")
        dynamic = tuple(_read_dynamic(settings))
        return cls(_Scheme.read(settings), version == "gptq", dynamic, stored)

    def __str__(self) -> str:
        order = ", inputs sorted by group" if self.scheme.sorts_inputs else ""
        groups = groups_in_words(self.scheme.group_size)
        version = 1 if self.stores_zero_less_one else 2
        return f"GPTQ version {version}: {self.scheme.bits} bits, {groups}{order}"

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        name, (out_features, in_features) = kept.name, kept.shape
        scheme = self._scheme_of(name)
        if scheme is None:
            return None
        packed = per_word(scheme.bits)
        for what, size in (("outputs", out_features), ("inputs", in_features)):
            if size % packed:
                raise ModelFileError(f"{name} has {size} {what}: GPTQ packs {packed} to a word")
        if scheme.sorts_inputs and kept.num_columns < in_features:
            raise ConfigError(
                f"--tensor-parallel-size {in_features // kept.num_columns}: the "
                f"inputs of {name} are in groups of any order (GPTQ with desc_act), which ranks "
                "cannot share: use 1, or a checkpoint without desc_act"
            )
        check_slice_bounds(kept, packed, f"words of {packed} inputs")
        groups = groups_of_slice(kept, scheme.group_size)
        kept_words, _ = words(kept.rows, packed)
        scale_dtype = self.stored.float_dtype(f"{name}.scales", torch.float16)
        slots = {
            "qweight": Slot(
                (in_features // packed, out_features),
                torch.int32,
                (words(kept.columns, packed)[0], kept.rows),
            ),
            "qzeros": Slot(
                (groups.count, out_features // packed), torch.int32, (groups.kept, kept_words)
            ),
            "scales": Slot((groups.count, out_features), scale_dtype, (groups.kept, kept.rows)),
        }
        # Some tools leave it out where inputs are in order.
        if scheme.sorts_inputs or self.stored.has(f"{name}.g_idx"):
            slots["g_idx"] = Slot((in_features,), torch.int32, (kept.columns,))
        return CheckpointProjection(slots, partial(self._unpack, kept, scheme, groups.size))

    def _scheme_of(self, name: str) -> _Scheme | None:
        if not self.stored.has(f"{name}.qweight"):
            return None
        for pattern, scheme in self.dynamic:
            if any(pattern.match(alias) for alias in aliases(name)):
                return scheme
        return self.scheme

    def _unpack(
        self, kept: Projection, scheme: _Scheme, group_size: int, tensors: Mapping[str, Tensor]
    ) -> GroupedWeight:
        name, bits, packed_zeros = kept.name, scheme.bits, tensors["qzeros"]
        if self.stores_zero_less_one:
            # As GPTQModel took it off: of words, so that zero points of 0 borrow from their
            # neighbours.
            packed_zeros = (packed_zeros.long() + _ONE_EACH[bits]).to(torch.int32)
        in_words = words(kept.rows, per_word(bits))[1]
        zero_OG = unpack_words(packed_zeros, bits)[:, in_words].t()
        if scheme.is_symmetric:
            self._check_version(name, zero_OG, bits)
        weight = GroupedWeight(
            unpack_words(tensors["qweight"].t(), bits),
            bits,
            group_size,
            tensors["scales"].t().contiguous(),
            zeros_or_none(zero_OG, bits),
        )
        if "g_idx" not in tensors:
            return weight
        return sort_inputs(
            name, weight, tensors["g_idx"], kept.columns, sorts_inputs=scheme.sorts_inputs
        )

    def _check_version(self, name: str, zero_OG: Tensor, bits: int) -> None:
        # The versions differ by one: a symmetric file read as the other is off the middle
        # throughout.
        read = (1 << (bits - 1)) + (1 if self.stores_zero_less_one else -1)
        if bool((zero_OG == read).all()):
            ours, theirs = _FORMATS if self.stores_zero_less_one else reversed(_FORMATS)
            raise ModelFileError(
                f"{name}.qzeros: sym is true, but every zero point reads as {read}. The file seems "
                f"to be {theirs} and is read as {ours}: set checkpoint_format of "
                f"quantization_config to {theirs}"
            )


def _version(settings: Settings) -> str:
    # GPTQModel's own files call `format` what other tools' call `checkpoint_format`.
    said = {
        name: refuse_unless(settings, name, str, _FORMATS)
        for name in ("checkpoint_format", "format")
        if settings.has(name)
    }
    if len(set(said.values())) > 1:
        raise settings.error("format", f"is not the checkpoint_format, {said['checkpoint_format']}")
    return next(iter(said.values()), _FORMATS[0])


def _read_dynamic(settings: Settings) -> list[tuple[Pattern, _Scheme]]:
    """ "+:pattern" or "pattern" with settings of its own, "-:pattern" for what is not quantized."""
    rules = settings.section("dynamic")
    if len(rules.values) > MAX_REGEXES:
        raise settings.error("dynamic", f"has {len(rules.values)} rules; {MAX_REGEXES} are read")
    found = []
    for text in rules.values:
        pattern = Pattern(rules.source, text.removeprefix("-:").removeprefix("+:"))
        if text.startswith("-:"):
            # If the files have such a module quantized all the same, it is so as most are.
            found.append((pattern, _Scheme.read(settings)))
            continue
        own = rules.section(text)
        refuse_if_set(own, "adapter", "rotation")
        kept = {
            name: settings.values.get(name) for name in ("bits", "group_size", "desc_act", "sym")
        }
        found.append((pattern, _Scheme.read(own.with_values(kept | own.values))))
    return found


def sort_inputs(
    name: str, weight: GroupedWeight, g_idx: Tensor, columns: slice, *, sorts_inputs: bool = True
) -> GroupedWeight:
    """Return a weight with its columns sorted by group; g_idx[i] is the group of column i.

    Raises:
        ModelFileError: groups have another size than config.json says, or should be sorted already.
    """
    num_groups = weight.scale_OG.shape[1]
    num_inputs = weight.in_features
    in_order = torch.arange(num_inputs, device=g_idx.device) // weight.group_size
    first_group = columns.start // weight.group_size if num_groups > 1 or columns.start else 0
    if num_groups == 1 and not bool(g_idx.any()):
        first_group = 0
    if torch.equal(g_idx.long() - first_group, in_order):
        return weight
    if not sorts_inputs:
        raise ModelFileError(
            f"{name}.g_idx does not have groups of {weight.group_size} inputs in their order, and "
            "desc_act is not true: is it what config.json says?"
        )
    sorted_idx, order = g_idx.long().sort(stable=True)
    if not torch.equal(sorted_idx, in_order):
        raise ModelFileError(
            f"{name}.g_idx does not give each of {num_groups} groups {weight.group_size} inputs: "
            "download the model again"
        )
    return replace(
        weight,
        values_OI=weight.values_OI[:, order].contiguous(),
        permutation_I=order.to(torch.int32),
    )
