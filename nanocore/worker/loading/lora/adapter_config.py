"""What adapter_config.json says: which modules an adapter changes, and by what it is multiplied.

As PEFT reads it. A setting that would change the result and is not implemented is refused by its
name, and so is one that is not known here, unless it is off.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.settings import Range, Settings

CONFIG_FILE: Final = "adapter_config.json"
_MAX_RANK: Final = 2**14
_MAX_PATTERN: Final = 1000
"""Characters of a pattern that is tried on every module."""

_UNUSED: Final = frozenset(
    (
        "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
        "task_type",
    )
)  # fmt: skip
"""Of training and of how it began: `init_lora_weights` says whether that changed the model. The
matrices are [rank, inputs] and [outputs, rank] whatever `fan_in_fan_out` says of the model's."""
_UNUSED_PREFIX: Final = "auto_"

_KEEPING_THE_BASE: Final = ("gaussian", "eva", "orthogonal")
"""Ways to begin that leave the model's own weights as they are; so do true and false."""

_EVERYTHING: Final = "all-linear"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter.

    target_modules: ends of modules' names, or a pattern of whole names. layers: numbers of the
    layers that it changes; None: all. rank_pattern, alpha_pattern: by patterns of modules' ends,
    of which the first that fits counts.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: list[str] | str
    exclude_modules: list[str] | str
    layers: list[int] | None
    layers_pattern: list[str]

    def rank_of(self, module: str) -> int:
        """Of a module's two matrices."""
        return self.rank_pattern.get(_first_that_fits(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What their product is multiplied by."""
        alpha = self.alpha_pattern.get(_first_that_fits(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter is to change this module."""
        if self.exclude_modules and _is_among(module, self.exclude_modules):
            return False
        if self.target_modules == _EVERYTHING:
            return module.rpartition(".")[2] != "lm_head"
        if not _is_among(module, self.target_modules):
            return False
        if self.layers is None or isinstance(self.target_modules, str):
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        found = (re.match(rf"(?:.*?\.)?{p}\.(\d+)\.", module) for p in patterns)
        number = next((match[1] for match in found if match), None)
        return number is not None and int(number) in self.layers


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The settings of the adapter in this folder.

    Raises:
        ModelFileError: the file is missing or malformed, or a setting is not implemented.
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
    config = AdapterConfig(
        rank=settings.size("r", most=_MAX_RANK),
        alpha=settings.number("lora_alpha", 8, Range(-1e6, 1e6)),
        use_rslora=settings.get("use_rslora", bool, False),
        rank_pattern=settings.get("rank_pattern", dict[str, int], {}),
        alpha_pattern=settings.get("alpha_pattern", dict[str, float], {}),
        target_modules=_names(settings, "target_modules"),
        exclude_modules=_names(settings, "exclude_modules"),
        layers=_layers(settings),
        layers_pattern=_list(_names(settings, "layers_pattern")),
    )
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(settings, name, list(getattr(config, name)))
    if any(not 0 < rank <= _MAX_RANK for rank in config.rank_pattern.values()):
        raise settings.error("rank_pattern", f"has a rank that is not from 1 to {_MAX_RANK}")
    if not config.target_modules:
        raise settings.error("target_modules", "must name the modules that the adapter changes")
    _refuse_what_is_not_known(settings)
    return config


def _refuse_what_is_not_known(settings: Settings) -> None:
    """What is off changes nothing, whatever it is."""
    for name, value in settings.values.items():
        is_read = name in settings.read_names or name in _UNUSED or name.startswith(_UNUSED_PREFIX)
        if value and not is_read:
            raise settings.error(name)


def _names(settings: Settings, name: str) -> list[str] | str:
    """A pattern, or a list of names; empty where there is none."""
    value = settings.get(name, list[str] | str, [])  # type: ignore[arg-type]
    _check_patterns(settings, name, [value] if isinstance(value, str) else [])
    return value


def _list(value: list[str] | str) -> list[str]:
    return [value] if isinstance(value, str) else value


def _layers(settings: Settings) -> list[int] | None:
    value = settings.get("layers_to_transform", list[int] | int, [])  # type: ignore[arg-type]
    return [value] if isinstance(value, int) else value or None


def _check_patterns(settings: Settings, name: str, patterns: list[str]) -> None:
    for pattern in patterns:
        if len(pattern) > _MAX_PATTERN:
            raise settings.error(name, f"has a pattern of more than {_MAX_PATTERN} characters")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise settings.error(name, f"has a pattern that is none: {error}") from None


def _is_among(module: str, names: list[str] | str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_that_fits(patterns: dict[str, int] | dict[str, float], module: str) -> str:
    """The pattern, or the module's name if none does."""
    fitting = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    return next(fitting, module)


def missing_adapter(folder: Path) -> ModelFileError:
    """The error that there is no adapter in a folder."""
    return ModelFileError(
        f"--merge-lora {folder}: there is no {CONFIG_FILE}: give the folder that PEFT's "
        "save_pretrained wrote"
    )
