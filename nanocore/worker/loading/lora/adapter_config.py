"""What adapter_config.json says: which modules an adapter changes, and by what it is multiplied.

As PEFT reads it. A setting that would change the result and is not implemented is refused by its
name, and so is one that is not known here, unless it is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.settings import Range, Settings
from nanocore.worker.loading.formats.patterns import MAX_REGEXES, Pattern

T = TypeVar("T")

CONFIG_FILE: Final = "adapter_config.json"
_MAX_RANK: Final = 2**14

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

    target_modules, exclude_modules: ends of modules' names, or a pattern of whole names; None: all
    linear layers. layers: numbers of the layers that it changes; None: all. layers_patterns: of
    names up to such a number. ranks, alphas: by patterns of modules' ends, of which the first that
    fits counts.
    """

    rank: int
    alpha: float
    use_rslora: bool
    ranks: list[tuple[Pattern, int]]
    alphas: list[tuple[Pattern, float]]
    target_modules: list[str] | Pattern | None
    exclude_modules: list[str] | Pattern
    layers: list[int] | None
    layers_patterns: list[Pattern]

    def rank_of(self, module: str) -> int:
        """Of a module's two matrices."""
        return _first_that_fits(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What their product is multiplied by."""
        alpha = _first_that_fits(self.alphas, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter is to change this module."""
        if _is_among(module, self.exclude_modules):
            return False
        if self.target_modules is None:
            return module.rpartition(".")[2] != "lm_head"
        if not _is_among(module, self.target_modules):
            return False
        if self.layers is None or isinstance(self.target_modules, Pattern):
            return True
        found = (pattern.match(module) for pattern in self.layers_patterns)
        number = next((match[match.lastindex] for match in found if match), None)
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
        exclude_modules=_modules(settings, "exclude_modules"),
        layers=_layers(settings),
        layers_patterns=_layers_patterns(settings),
    )
    _refuse_what_is_not_known(settings)
    return config


def _refuse_what_is_not_known(settings: Settings) -> None:
    """What is off changes nothing, whatever it is."""
    for name, value in settings.values.items():
        is_read = name in settings.read_names or name in _UNUSED or name.startswith(_UNUSED_PREFIX)
        if value and not is_read:
            raise settings.error(name)


def _modules(settings: Settings, name: str) -> list[str] | Pattern:
    """A pattern of whole names, or a list of their ends; empty where there is none."""
    value = settings.get(name, list[str] | str, [])  # type: ignore[arg-type]
    if isinstance(value, str) and value:
        return _patterns(settings, name, [rf"(?:{value})\Z"])[0]
    return list(value)


def _layers(settings: Settings) -> list[int] | None:
    value = settings.get("layers_to_transform", list[int] | int, [])  # type: ignore[arg-type]
    return [value] if isinstance(value, int) else value or None


def _layers_patterns(settings: Settings) -> list[Pattern]:
    name = "layers_pattern"
    value = settings.get(name, list[str] | str, []) or [r"[^.]*"]  # type: ignore[arg-type]
    texts = [value] if isinstance(value, str) else value
    return _patterns(settings, name, [rf"(?:.*?\.)?(?:{text})\.(\d+)\." for text in texts])


def _by_end(settings: Settings, name: str, values: dict[str, T]) -> list[tuple[Pattern, T]]:
    """Values by patterns of modules' ends."""
    patterns = _patterns(settings, name, [rf"(.*\.)?({text})$" for text in values])
    return list(zip(patterns, values.values(), strict=True))


def _patterns(settings: Settings, name: str, texts: list[str]) -> list[Pattern]:
    if len(texts) > MAX_REGEXES:
        raise settings.error(name, f"has {len(texts)} patterns; at most {MAX_REGEXES} are read")
    return [Pattern(f"{settings.source}: {name}", text) for text in texts]


def _is_among(module: str, names: list[str] | Pattern) -> bool:
    if isinstance(names, Pattern):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_that_fits(values: list[tuple[Pattern, T]], module: str, default: T) -> T:
    return next((value for pattern, value in values if pattern.matches(module)), default)


def missing_adapter(folder: Path) -> ModelFileError:
    """The error that there is no adapter in a folder."""
    return ModelFileError(
        f"--merge-lora {folder}: there is no {CONFIG_FILE}: give the folder that PEFT's "
        "save_pretrained wrote"
    )
