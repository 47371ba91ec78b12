"""An architecture's settings in a GGUF file, taken by name and type; what nobody takes is refused.

llama.cpp's converter writes what a model differs in, so that a setting which is not known here may
well change what the model says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.loading.gguf.architectures import architecture_name
from nanocore.worker.loading.gguf.header import Header

_NO_MATTER: Final = frozenset(
    {
        "vocab_size", "tensor_data_layout", "pooling_type", "attention.layer_norm_epsilon",
        "rope.scaling.finetuned",
    }
)  # fmt: skip
"""Said elsewhere too, or of uses other than generating."""


class Metadata:
    """Settings without their architecture's name before them.

    path: of the file. architecture: see `ARCHITECTURES`.
    """

    def __init__(self, header: Header) -> None:
        self.path: Path = header.path
        self.architecture = architecture_name(header)
        prefix = f"{self.architecture}."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether it is there."""
        self._taken.add(name)
        return name in self._values

    def size(self, name: str, default: int | None = None) -> int:
        """An integer; where there is one for each layer, that of all. config.json's reader checks
        its range."""
        value = self._take(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "is not one integer, and only models of equal layers are served")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "is no number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self.error(name, "is no text")
        return value

    def flags(self, name: str) -> list[bool] | None:
        """One for each layer; None if it is not there."""
        value = self._take(name, []) or None
        if value is not None and not (
            isinstance(value, list) and all(isinstance(flag, bool) for flag in value)
        ):
            raise self.error(name, "is no list of booleans, one for each layer")
        return value

    def expect(self, name: str, value: Any, *, default: Any, unless: bool = False) -> None:
        """Refuse a setting of any other value."""
        if self._take(name, default) != value and not unless:
            raise self.error(name, f"is not served: only {value} is")

    def check_all_taken(self) -> None:
        """Refuse settings that nobody has asked for."""
        for name in self._values:
            if name not in self._taken and name not in _NO_MATTER:
                raise self.error(name, "is a setting that is not served")

    def error(self, name: str, why: str) -> ModelFileError:
        """The error that says why a setting cannot be used."""
        value = shorten(repr(self._values.get(name)))
        return ModelFileError(f"{self.path}: {self.architecture}.{shorten(name)} = {value} {why}")

    def _take(self, name: str, default: Any) -> Any:
        self._taken.add(name)
        value = self._values.get(name, default)
        if value is None:
            raise ModelFileError(f"{self.path}: {self.architecture}.{name} is missing")
        return value
