"""Files of datasets as rows. What is wrong with one is a ConfigError that names file and line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import msgspec

from nanocore.protocol.errors import ConfigError


class DatasetFile:
    """The file of --dataset-path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> bytes:
        """All of it.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except OSError as error:
            self.refuse(error.strerror or str(error))

    def json_lines(self) -> Iterator[tuple[int, dict[str, object]]]:
        """(number of the line, its object); empty lines are left out.

        Raises:
            ConfigError: a line is no JSON object.
        """
        for number, line in enumerate(self.read().splitlines(), 1):
            if line.strip():
                try:
                    yield number, msgspec.json.decode(line, type=dict[str, object])
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    self.refuse(f"{error}", number)

    def refuse(self, problem: str, line: int | None = None) -> NoReturn:
        """Raises ConfigError."""
        where = "" if line is None else f", line {line}"
        raise ConfigError(f"--dataset-path {self.path}{where}: {problem}")

    def count(self, value: object, name: str, line: int, least: int = 0) -> int:
        """A value that is a whole number.

        Raises:
            ConfigError: it is not, or too small.
        """
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(f"{name} is {value!r}: a whole number from {least} on", line)
        return value
