"""The history of what was typed, as prompt_toolkit asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from prompt_toolkit.history import FileHistory

from nanocore.cli.chat.files import open_regular

MAX_ENTRIES: Final = 1000
MAX_ENTRY_CHARS: Final = 2**14


class InputHistory(FileHistory):
    """What was typed, the last 1,000 entries of at most 16 Ki characters, in a file of mode 0600.

    Args:
        complain: is told, once, why the file cannot be used; the entries stay in memory then.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._path, self._complain = path, complain
        self._has_failed = False
        try:
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW))
            path.chmod(0o600)
            self._shorten()
        except OSError as error:
            self._fail(error)

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        if self._has_failed:
            return []
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self._fail(error)
            return []

    def store_string(self, string: str) -> None:
        """Keep it for other times, unless it is too long."""
        if self._has_failed or len(string) > MAX_ENTRY_CHARS:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._fail(error)

    def _shorten(self) -> None:
        """Leave the oldest entries out of the file, once there are twice too many."""
        entries = list(super().load_history_strings())
        if len(entries) <= 2 * MAX_ENTRIES:
            return
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fd = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            for entry in reversed(entries[:MAX_ENTRIES]):
                file.write("\n" + "".join([f"+{line}\n" for line in entry.split("\n")]))
        beside.replace(self._path)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._complain(f"{self._path}: {error.strerror}: what is typed is not kept there")
