"""The settings of one JSON file of a model folder, taken by name, type and range.

A value of the wrong type or out of its range, and a setting that nanocore does not implement, end
in a `ModelFileError` that names the file, the setting, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_file import MAX_SETTINGS_BYTES, read_json

T = TypeVar("T")
N = TypeVar("N", int, float)

MAX_SIZE: Final = 2**31 - 1
"""Sizes, positions and token ids are 32-bit numbers in kernels and on the wire."""


@dataclass(frozen=True, slots=True)
class Range:
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
        self.source, self.values, self.name = str(source), values, name
        self.read_names: set[str] = set()
        self.names_at_top: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The file's settings.

        Raises:
            ModelFileError: it is missing, or no JSON object.
        """
        try:
            return cls(path, read_json(path, dict[str, Any], MAX_SETTINGS_BYTES))
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing") from None

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

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The setting, or the default where it is absent or null."""
        return self._convert(name, kind) if self.has(name) else default

    def nullable(self, name: str, kind: type[T], default: T | None) -> T | None:
        """The setting, None where it is null, or the default where it is absent."""
        if not self.is_set(name):
            return default
        return self._convert(name, kind) if self.has(name) else None

    def number(self, name: str, default: float, limits: Range) -> float:
        """A number within limits, or the default where it is absent or null."""
        return self.within(name, self.get(name, float, default), limits)

    def size(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer from 1 to `most`; required where there is no default."""
        value = self.get(name, int, default)
        if value is None:
            raise ModelFileError(f"{self.source}: {self._full(name)} is missing")
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
        """The error that says why this setting cannot be used."""
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
