"""LoRA adapters (Hu et al. 2021) in PEFT's layout, merged into weights while they are loaded.

W + scale * B A is computed in float32 from what the file holds, for a rank's slice, and rounded
once to the model's dtype; quantization at load sees the merged weights. adapter_config.json is read
as PEFT reads it: a setting that would change the result and is not implemented is refused, and so
is an unknown one, unless it is off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from nanocore.protocol.errors import ModelFileError, quoted
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.loading.checkpoint import CheckpointTensor, read_header
from nanocore.worker.loading.formats.patterns import MAX_REGEXES, Pattern
from nanocore.worker.loading.weights import (
    FLOATS,
    CheckpointProjection,
    Entries,
    Projection,
    Slot,
    TensorNames,
    WeightFormat,
    is_finite,
)

T = TypeVar("T")

CONFIG_FILE: Final = "adapter_config.json"
_MAX_RANK: Final = 2**14

_UNUSED: Final = frozenset(
    (
        "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    )
)  # fmt: skip
"""Settings of training and initialization; `init_lora_weights` says if that changed the model. What
was excluded, and other layers, have no tensors. The matrices are [rank, inputs] and [outputs, rank]
whatever `fan_in_fan_out` says of the model's."""
_UNUSED_PREFIX: Final = "auto_"

_KEEPING_THE_BASE: Final = ("gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they are; so do true and false."""

_EVERYTHING: Final = "all-linear"


class AdapterConfig(msgspec.Struct, frozen=True):
    """The settings of an adapter.

    target_modules: ends of modules' names, or a pattern of whole names; None: all linear layers.
    ranks, alphas: by patterns of modules' ends, of which the first that fits counts.
    """

    rank: int
    alpha: float
    use_rslora: bool
    ranks: list[tuple[Pattern, int]]
    alphas: list[tuple[Pattern, float]]
    target_modules: list[str] | Pattern | None

    def rank_of(self, module: str) -> int:
        return _first_that_fits(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        alpha = _first_that_fits(self.alphas, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        if self.target_modules is None:
            return module.rpartition(".")[2] != "lm_head"
        return _is_among(module, self.target_modules)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The settings of the adapter in this folder.

    Raises ModelFileError: the file is missing or malformed, or a setting is not implemented.
    """
    settings = Settings.read(folder / CONFIG_FILE)
    if settings.get("peft_type", str, "") != "LORA":
        raise settings.error("peft_type", "is not implemented; LORA is")
    if settings.get("bias", str, "none") != "none":
        raise settings.error("bias", 'is not implemented; "none" is')
    begun = settings.get("init_lora_weights", bool | str, True)  # type: ignore[arg-type]
    if isinstance(begun, str) and begun not in _KEEPING_THE_BASE:
        raise settings.error(
            "init_lora_weights",
            "changed the model's own weights, so that the adapter does not fit them: convert it "
            "to a plain one with PEFT (save_pretrained, path_initial_model_for_weight_conversion)",
        )
    ranks = settings.get("rank_pattern", dict[str, int], {})
    if any(not 0 < rank <= _MAX_RANK for rank in ranks.values()):
        raise settings.error("rank_pattern", f"has a rank that is not from 1 to {_MAX_RANK}")
    targets = _modules(settings, "target_modules")
    if targets == []:
        raise settings.error("target_modules", "must name the modules that the adapter changes")
    everything = settings.values.get("target_modules") == _EVERYTHING
    config = AdapterConfig(
        rank=settings.size("r", most=_MAX_RANK),
        alpha=settings.number("lora_alpha", 8, Range(-1e6, 1e6)),
        use_rslora=settings.get("use_rslora", bool, False),
        ranks=_by_end(settings, "rank_pattern", ranks),
        alphas=_by_end(
            settings, "alpha_pattern", settings.get("alpha_pattern", dict[str, float], {})
        ),
        target_modules=None if everything else targets,
    )
    # A setting that is off changes nothing, whatever it is.
    for name, value in settings.values.items():
        is_read = name in settings.read_names or name in _UNUSED or name.startswith(_UNUSED_PREFIX)
        if value and not is_read:
            raise settings.error(name)
    return config


def _modules(settings: Settings, name: str) -> list[str] | Pattern:
    value = settings.get(name, list[str] | str, [])  # type: ignore[arg-type]
    if isinstance(value, str) and value:
        return _patterns(settings, name, [rf"(?:{value})\Z"])[0]
    return list(value)


def _by_end(settings: Settings, name: str, values: dict[str, T]) -> list[tuple[Pattern, T]]:
    patterns = _patterns(settings, name, [rf"(.*\.)?({text})$" for text in values])
    return list(zip(patterns, values.values(), strict=True))


def _patterns(settings: Settings, name: str, texts: list[str]) -> list[Pattern]:
    if len(texts) > MAX_REGEXES:
        raise settings.error(name, f"has {len(texts)} patterns; at most {MAX_REGEXES} are read")
    return [Pattern(f"{settings.source}: {name}", text) for text in texts]


def _is_among(module: str, names: list[str] | Pattern) -> bool:
    if isinstance(names, Pattern):
        return names.match(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_that_fits(values: list[tuple[Pattern, T]], module: str, default: T) -> T:
    return next((value for pattern, value in values if pattern.match(module)), default)


_FILE: Final = "adapter_model.safetensors"
_OLD_FILE: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
_ENDS: Final = (".lora_A.weight", ".lora_B.weight")
_BASE: Final = ".base_layer.weight"
_EXPERTS: Final = (".experts.", ".mlp.experts")


class LowRank(msgspec.Struct, frozen=True):
    """Product that is added to a weight [O, I]: scale * B A.

    where: the file and the module, as messages name them. base: the weight itself, as PEFT saves
    that of a head beside its adapter.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    where: str
    base: CheckpointTensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def merged(
        self, rows: slice, columns: slice, dtype: torch.dtype, slots: Mapping[str, Tensor]
    ) -> Tensor:
        """These rows and columns of the weight, which slots have in float32, with it added.

        Raises ModelFileError: the adapter comes with a weight, and it is another one; or the result
            is not finite.
        """
        weight = slots["weight"]
        if self.base is not None:
            with safe_open(self.base.path, framework="pt") as file:
                base = file.get_slice(self.base.name)[rows, columns]
            if not torch.equal(weight.to(base.dtype).cpu(), base):
                raise ModelFileError(
                    f"{self.where} comes with a base_layer.weight that is not the model's: the "
                    "adapter is of another model, or changed it: merge it with PEFT "
                    "(merge_and_unload, save_pretrained) and load the result"
                )
        b, a = (x.to(weight) for x in (self.b_OR[rows], self.a_RI[:, columns]))
        merged = weight.addmm_(b, a, alpha=self.scale).to(dtype)
        if not is_finite(merged):
            raise ModelFileError(
                f"{self.where} makes its weight infinite; its numbers or their scale, "
                f"{self.scale:g}, are too large: download the adapter again, or take another"
            )
        return merged


class Adapter(msgspec.Struct, frozen=True):
    """One adapter. modules: by projections' names. digest: of both its files."""

    folder: Path
    modules: dict[str, LowRank]
    digest: bytes


def read_adapter(folder: Path, names: TensorNames) -> Adapter:
    """The adapter in a folder, as PEFT writes it. names: from the model's files to its entries.

    Raises:
        ModelFileError: a file is missing or damaged; the adapter is of a kind that is not merged,
            or contradicts itself.
    """
    if not (folder / CONFIG_FILE).exists():
        raise ModelFileError(
            f"--merge-lora {folder}: there is no {CONFIG_FILE}: give the folder that PEFT's "
            "save_pretrained wrote"
        )
    config = read_adapter_config(folder)
    path = folder / _FILE
    if not path.exists() and (folder / _OLD_FILE).exists():
        raise ModelFileError(
            f"{folder} has {_OLD_FILE}, which is not read: load it with PEFT and call "
            "save_pretrained(folder, safe_serialization=True)"
        )
    modules = {}
    pairs = _pairs(path, config)
    with safe_open(path, framework="pt") as file:
        for module, (a, b, base) in pairs.items():
            name = (names(f"{module}.weight") or f"{module}.weight").removesuffix(".weight")
            where = f"{path}: module {quoted(module)}"
            a_RI, b_OR = file.get_tensor(a.name), file.get_tensor(b.name)
            if not (is_finite(a_RI) and is_finite(b_OR)):
                raise ModelFileError(f"{where} has NaN or infinity: download the adapter again")
            modules[name] = LowRank(a_RI, b_OR, config.scale_of(module), where, base)
    digest = xxhash.xxh3_128()
    for stored in (folder / CONFIG_FILE, path):
        digest.update(stored.read_bytes())
    return Adapter(folder, modules, digest.digest())


def _pairs(
    path: Path, config: AdapterConfig
) -> dict[str, tuple[CheckpointTensor, CheckpointTensor, CheckpointTensor | None]]:
    tensors = {tensor.name: tensor for tensor in read_header(path)}
    pairs = {}
    bases = {
        name: tensors.pop(name)
        for name in list(tensors)
        if name.endswith(_BASE) and name.removesuffix(_BASE) + _ENDS[0] in tensors
    }
    for name in sorted(tensors):
        where = f"{path}: tensor {quoted(name)}"
        if not name.startswith(_PREFIX) or not name.endswith(_ENDS):
            raise ModelFileError(
                f"{where} is not merged: only lora_A and lora_B of linear layers are"
            )
        module = name.removeprefix(_PREFIX).removesuffix(_ENDS[0]).removesuffix(_ENDS[1])
        if any(word in f".{module}" for word in _EXPERTS):
            raise ModelFileError(
                f"{where} is of experts, which are not merged: merge it with PEFT "
                "(merge_and_unload, save_pretrained) and load the result"
            )
        if not config.targets(module):
            raise ModelFileError(
                f"{where} is not among the target_modules of {CONFIG_FILE}: the files are not of "
                "the same adapter; download both again"
            )
        a, b = (tensors.get(f"{_PREFIX}{module}{end}") for end in _ENDS)
        if a is None or b is None:
            raise ModelFileError(f"{where} has no counterpart {_ENDS[a is not None][1:7]}")
        _check_pair(a, b, config.rank_of(module))
        pairs[module] = (a, b, bases.get(f"{_PREFIX}{module}{_BASE}"))
    if not pairs:
        raise ModelFileError(f"{path} has no tensors")
    return pairs


def _check_pair(a: CheckpointTensor, b: CheckpointTensor, rank: int) -> None:
    for tensor, axis in ((a, 0), (b, 1)):
        where = f"{tensor.path}: tensor {quoted(tensor.name)}"
        if tensor.dtype not in FLOATS:
            raise ModelFileError(f"{where} is {tensor.dtype}; one of {', '.join(FLOATS)} is read")
        if len(tensor.shape) != 2 or tensor.shape[axis] != rank:
            raise ModelFileError(
                f"{where} has shape {list(tensor.shape)}, and {CONFIG_FILE} says that its rank is "
                f"{rank}: the files are not of the same adapter; download both again"
            )


class MergedFormat:
    """Implements `WeightFormat`: another format, or floats, with an adapter merged.

    dtype: of the model's weights.
    """

    def __init__(self, base: WeightFormat | None, adapter: Adapter, dtype: torch.dtype) -> None:
        self.name = "floats" if base is None else base.name
        self.base = base
        self.adapter = adapter
        self._dtype = dtype

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        """See `WeightFormat`.

        Raises ModelFileError: the adapter's module has another shape, or the weight is quantized.
        """
        stored = None if self.base is None else self.base.projection(kept)
        module = self.adapter.modules.get(kept.name)
        if module is None:
            return stored
        # GGUF files may have other orders of value heads.
        if stored is not None or (self.name == "gguf" and ".linear_attn." in kept.name):
            raise ModelFileError(
                f"--merge-lora: {module.where} is stored as {self.name}, and what is merged would "
                "have to be rounded again: merge into the model's unquantized checkpoint, and "
                "quantize at load with --quantization"
            )
        if module.shape != kept.shape:
            raise ModelFileError(
                f"{module.where} is for a weight of shape {list(module.shape)}, and the model's is "
                f"{list(kept.shape)}: the adapter is of another model"
            )
        slot = Slot(kept.shape, torch.float32, (kept.rows, kept.columns), is_exact=False)
        unpack = partial(module.merged, kept.rows, kept.columns, self._dtype)
        return CheckpointProjection({"weight": slot}, unpack, is_float=True)

    def check_used(self, entries: Entries) -> None:
        """Check that the model has every module of the adapter.

        Raises ModelFileError: it lacks one.
        """
        for name, module in self.adapter.modules.items():
            if f"{name}.weight" not in entries:
                raise ModelFileError(
                    f"{module.where} is not part of this model: the adapter is of another one"
                )
