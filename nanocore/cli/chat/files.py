"""Files of the chat in `$XDG_STATE_HOME/nanocore`: engine log, history of the prompt.

The directory, `~/.local/state/nanocore` by default, is accessible to its user alone. Only
regular files are opened, because opening a pipe might block forever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nanocore.protocol.errors import ConfigError
from nanocore.system.private_directory import make_private, open_regular


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory, made if it was missing.

    Raises:
        ConfigError: it cannot be made, or others can access it.
    """
    named = environment.get("XDG_STATE_HOME", "")
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigError(f"no directory for history and logs: {error}") from None
    directory = base / "nanocore"
    make_private(directory, "the directory for history and logs")
    return directory


def open_engine_log(complain: Callable[[str], None]) -> EngineLog:
    """Open `chat-engine.log`; without a state directory, complain and discard the log."""
    try:
        return EngineLog(state_directory() / "chat-engine.log")
    except ConfigError as error:
        complain(f"{error}: the engine's log is not kept")
        return EngineLog(None)


class EngineLog:
    """Log file of a launched engine, whose lines must not mix with the conversation.

    Args:
        path: None discards the log.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        how = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        try:
            self.fd = os.open(os.devnull, os.O_RDWR) if path is None else open_regular(path, how)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: cannot write the log") from None

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
