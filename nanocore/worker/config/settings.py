"""The settings of one JSON file of a model folder, taken by name and type.

A value of the wrong type or range, and a setting that nanocore does not implement, end in a
`ModelFileError` that names the file, the setting and the value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nanocore.protocol.errors import ModelFileError

T = TypeVar("T")


class Settings:
    """A JSON object and the file it comes from.

    values: by name. name: of the object inside the file, empty for the file itself.
    """

    def __init__(self, path: Path, values: dict[str, Any], name: str = "") -> None:
        self.path, self.values, self.name = path, values, name

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The file's settings.

        Raises:
            ModelFileError: it is missing, or no JSON object.
        """
        try:
            return cls(path, msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing") from None
        except (OSError, msgspec.DecodeError) as error:
            raise ModelFileError(f"{path}: {error}") from None

    def has(self, name: str) -> bool:
        """Whether the setting is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The setting, or the default where it is absent or null."""
        return self._convert(name, kind) if self.has(name) else default

    def nullable(self, name: str, kind: type[T], default: T | None) -> T | None:
        """The setting, None where it is null, or the default where it is absent."""
        if name not in self.values:
            return default
        return self._convert(name, kind) if self.has(name) else None

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; required where there is no default."""
        value = self.get(name, int, default)
        if value is None:
            raise ModelFileError(f"{self.path}: {self._full(name)} is missing")
        if value < 1:
            raise self.error(name, "must be at least 1")
        return value

    def section(self, name: str) -> Settings:
        """The object under this name; empty where it is absent or null."""
        values = self.get(name, dict[str, Any], {})
        return Settings(self.path, values, self._full(name))

    def error(self, name: str, why: str = "is not implemented") -> ModelFileError:
        """The error that says why this setting cannot be used."""
        value = msgspec.json.encode(self.values.get(name)).decode()
        return ModelFileError(f"{self.path}: {self._full(name)} = {value:.200} {why}")

    def _full(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _convert(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.convert(self.values[name], kind)
        except msgspec.ValidationError as error:
            raise self.error(name, f"cannot be read: {error}") from None
