"""Settings of a model folder's JSON files, taken by name, type and range.

Anybody may have written these files: sizes are bounded, pipes are not opened, and text that is no
JSON, or nested without end, is an error like any other. A wrong type, a value out of range or an
unimplemented setting is a `ModelFileError` that names file, setting, value and limit. Values of
--hf-overrides replace config.json's, as in vLLM.
"""

from __future__ import annotations

import codecs
import functools
import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from nanocore.protocol.errors import ConfigError, ModelFileError, shorten

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_INDEX_BYTES: Final = 128 * 2**20
"""Ten times the index of the largest checkpoints."""

MAX_SETTINGS_BYTES: Final = 4 * 2**20
"""Small, because Python objects may take fifty times that."""


def read_json(path: Path, kind: type[T], max_bytes: int) -> T:
    """The file's value.

    Raises:
        FileNotFoundError: it is not there.
        ModelFileError: it cannot be read, is too large, or is not of this kind.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path} is not a file")
        if (num_bytes := path.stat().st_size) > max_bytes:
            raise ModelFileError(f"{path}: {num_bytes} bytes: at most {max_bytes} are read")
        content = path.read_bytes()
        if content.startswith(codecs.BOM_UTF8):
            note_oddity(f"{path} begins with a byte order mark, which is skipped")
        return msgspec.json.decode(content.removeprefix(codecs.BOM_UTF8), type=kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: JSON nested too deep") from None
    except ValueError as error:  # msgspec's errors are, and those of text that is no UTF-8
        raise ModelFileError(f"{path}: {error}; download it again") from None


@functools.cache
def note_oddity(text: str) -> None:
    """Log, once, how a model's files were understood that are not as they should be."""
    logger.warning("%s", text)


N = TypeVar("N", int, float)

MAX_SIZE: Final = 2**31 - 1
"""Sizes, positions and token ids are 32-bit numbers in kernels and on the wire."""


class Range(msgspec.Struct, frozen=True):
    """Numbers from low to high; low itself is none of them if it is to be exceeded."""

    low: float
    high: float
    exceeds_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.exceeds_low and value == self.low)

    def __str__(self) -> str:
        low = f"exceed {self.low:g} and be" if self.exceeds_low else f"be at least {self.low:g} and"
        return f"must {low} at most {self.high:.15g}"


class Settings:
    """A JSON object and the file it comes from.

    source: the file, as messages name it. values: by name. name: of the object inside the file,
    empty for the file itself. read_names: of all settings of the file that were asked for, dotted.
    names_at_top: of values that stand, or would, at the file's top and not in the object.
    """

    def __init__(self, source: Path | str, values: dict[str, Any], name: str = "") -> None:
        self.source = str(source)
        self.values = values
        self.name = name
        self.read_names: set[str] = set()
        self.names_at_top: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The file's settings. Raises ModelFileError: it is missing, or no JSON object."""
        try:
            return cls(path, read_json(path, dict[str, Any], MAX_SETTINGS_BYTES))
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing: is that the folder of a model?") from None

    def with_values(self, values: dict[str, Any], name: str | None = None) -> Settings:
        """Other values in the same place of the same file, or under a name in it."""
        other = Settings(self.source, values, self.name if name is None else name)
        other.read_names = self.read_names
        other.names_at_top = self.names_at_top if name is None else frozenset()
        return other

    def with_top(self, top: Settings, names: Iterable[str]) -> Settings:
        """With these names' values from the top of the file, which come before those here."""
        taken = {name: top.values[name] for name in names if top.has(name)}
        other = self.with_values(self.values | taken)
        other.names_at_top = frozenset(
            name for name in names if name in taken or name not in self.values
        )
        return other

    def is_set(self, name: str) -> bool:
        """Whether the setting is there, be it null."""
        self.read_names.add(self._full(name))
        return name in self.values

    def has(self, name: str) -> bool:
        """Whether the setting is there and not null."""
        return self.is_set(name) and self.values[name] is not None

    def was_read(self, name: str) -> bool:
        """Whether anything has asked for the setting."""
        return self._full(name) in self.read_names

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The setting, or the default where it is absent or null."""
        return self._convert(name, kind) if self.has(name) else default

    def required(self, name: str, kind: type[T]) -> T:
        """The setting. Raises ModelFileError: it is absent or null."""
        if not self.has(name):
            raise ModelFileError(f"{self.source}: {self._full(name)} is missing")
        return self._convert(name, kind)

    def nullable(self, name: str, kind: type[T], default: T | None) -> T | None:
        """The setting, None where it is null, or the default where it is absent."""
        if not self.is_set(name):
            return default
        return self._convert(name, kind) if self.has(name) else None

    def number(self, name: str, default: float, limits: Range) -> float:
        """A number within limits, or the default where it is absent or null."""
        return self.within(name, self.get(name, float, default), limits)

    def nullable_number(self, name: str, default: float | None, limits: Range) -> float | None:
        """A number within limits, None where it is null, or the default where it is absent."""
        value = self.nullable(name, float, default)
        return None if value is None else self.within(name, value, limits)

    def size(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer from 1 to `most`; required where there is no default."""
        value = self.required(name, int) if default is None else self.get(name, int, default)
        return self.within(name, value, Range(1, most))

    def within(self, name: str, value: N, limits: Range) -> N:
        """The value of a setting, once it is known to be within limits."""
        if value not in limits:
            raise self.error(name, str(limits))
        return value

    def section(self, name: str) -> Settings:
        """The object under this name; empty where it is absent or null."""
        values = self.get(name, dict[str, Any], {})
        return self.with_values(values, self._full(name))

    def error(self, name: str, why: str = "is not implemented") -> ModelFileError:
        try:
            value = msgspec.json.encode(self.values.get(name)).decode()
        except RecursionError:
            value = "(nested deep)"
        return ModelFileError(f"{self.source}: {self._full(name)} = {value:.200} {why}")

    def _full(self, name: str) -> str:
        full = f"{self.name}.{name}" if self.name and name not in self.names_at_top else name
        return f"{full:.200}"

    def _convert(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.convert(self.values[name], kind)
        except msgspec.ValidationError as error:
            raise self.error(name, f"cannot be read: {error}") from None


FLAG = "--hf-overrides"
_TEXT = "text_config"
_BASE = ("rope_theta", "partial_rotary_factor")
"""What `rope_parameters` holds beside the stretching that `rope_scaling` replaces."""


def override(settings: Settings, overrides: Mapping[str, Any]) -> Settings:
    """config.json with these values; errors then name the flag beside the file."""
    if not overrides:
        return settings
    values = _replaced(settings.values, overrides)
    ours, theirs = overrides.get(_TEXT), settings.values.get(_TEXT)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        values[_TEXT] = _replaced(theirs, ours)
    return Settings(f"{settings.source} with {FLAG}", values)


def check_all_read(settings: Settings, overrides: Mapping[str, Any]) -> None:
    """Refuse values that no part of the configuration has asked for: most are misspelled.

    Raises ConfigError: there is one.
    """
    names = list(overrides)
    if isinstance(text := overrides.get(_TEXT), dict):
        names += [f"{_TEXT}.{name}" for name in text]
    for name in names:
        if name.rpartition(".")[2] == "quantization_config":
            raise ConfigError(
                f"{FLAG}: {name} says how files store weights, and is read from config.json alone"
            )
        if name not in settings.read_names:
            last = name.rpartition(".")[2]
            elsewhere = [one for one in settings.read_names if one.rpartition(".")[2] == last]
            near = sorted(elsewhere) or get_close_matches(name, settings.read_names, n=1)
            raise ConfigError(
                f"{FLAG}: {shorten(name)} is not a setting of this model"
                + (f", the nearest is {near[0]}" if near else "; remove it")
            )


def _replaced(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    # The two schemas of rotary settings exclude each other: the one that is given counts.
    result = {**values, **overrides}
    if "rope_parameters" in overrides:
        return result if "rope_scaling" in overrides else _without(result, "rope_scaling")
    ropes = values.get("rope_parameters")
    if not isinstance(ropes, dict):
        return result
    nested = ropes.get("full_attention")  # Gemma 3, whose old schema speaks of these layers
    rope = _without(nested if isinstance(nested, dict) else ropes, *overrides)
    if "rope_scaling" in overrides:
        rope = {name: rope[name] for name in _BASE if name in rope}
        if isinstance(overrides["rope_scaling"], dict):
            result["rope_scaling"] = rope | overrides["rope_scaling"]
    result["rope_parameters"] = ropes | {"full_attention": rope} if nested is not None else rope
    return result


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
