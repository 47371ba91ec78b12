"""The command's files: the history of what was typed, and the log of a launched engine.

They lie in `$XDG_STATE_HOME/nanocore`, or `~/.local/state/nanocore`, which is the user's alone.
Neither grows for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from prompt_toolkit.history import FileHistory

from nanocore.protocol.errors import ConfigError
from nanocore.system.private_directory import make_private

MAX_ENTRIES: Final = 1000
MAX_ENTRY_CHARS: Final = 2**14
_TAIL_BYTES: Final = 4096


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """It, made if it was not there.

    Raises:
        ConfigError: it cannot be made, or is not the user's alone.
    """
    named = environment.get("XDG_STATE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    directory = base / "nanocore"
    make_private(directory, "the directory for history and logs")
    return directory


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
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            path.chmod(0o600)
            self._shorten()
        except OSError as error:
            self._fail(error)

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
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
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            for entry in reversed(entries[:MAX_ENTRIES]):
                file.write("\n" + "".join([f"+{line}\n" for line in entry.split("\n")]))
        beside.replace(self._path)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._complain(f"{self._path}: {error.strerror}: what is typed is not kept there")


def open_engine_log(complain: Callable[[str], None]) -> EngineLog:
    """In the state directory; where that cannot be, it goes nowhere, and `complain` is told why."""
    try:
        return EngineLog(state_directory() / "chat-engine.log")
    except ConfigError as error:
        complain(f"{error}: the engine's log is not kept")
        return EngineLog(Path(os.devnull))


class EngineLog:
    """Where a launched engine writes its log, for it must not write into the conversation.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: an engine's log goes there") from None

    def last_line(self) -> str:
        """What the engine said last, or ''."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().replace(b"\r", b"\n").split(b"\n")
        except OSError:
            return ""  # it is only shown while one waits
        return next((line.decode(errors="replace") for line in reversed(lines) if line), "")

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
