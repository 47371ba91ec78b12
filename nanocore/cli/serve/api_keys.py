"""API keys of flags, of a file that only its owner can read, and of the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ConfigError, KeyFileError

API_KEY_VARIABLE: Final = "NANOCORE_API_KEY"
MAX_KEY_FILE_BYTES: Final = 2**20


def api_keys(
    flags: Sequence[str], file: str | None, environment: MutableMapping[str, str]
) -> list[str]:
    """Return all keys. The one in the environment is removed, so that children do not inherit it.

    Raises:
        ConfigError: a key that no header can contain.
        KeyFileError: the file is invalid, or others can read it.
    """
    sources = [("--api-key", list(flags))]
    if file is not None:
        sources.append((f"--api-key-file {file}", _read(Path(file))))
    if API_KEY_VARIABLE in environment:
        sources.append((API_KEY_VARIABLE, [environment.pop(API_KEY_VARIABLE)]))
    for source, keys in sources:
        for key in keys:
            check_key(source, key)
    return list(dict.fromkeys(key for _, keys in sources for key in keys))


def check_key(source: str, key: str) -> None:
    """Raise ConfigError for a key that no header can contain. source: names it in the error."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: a key is printable ASCII without spaces, at least one character"
        )


def _read(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            _require_private(path, os.fstat(file.fileno()))
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"--api-key-file {path}: {error.strerror}") from None
    try:
        lines = [line.strip() for line in data.decode().splitlines()]
    except UnicodeDecodeError:
        raise KeyFileError(f"--api-key-file {path}: it is not UTF-8 text") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(data) > MAX_KEY_FILE_BYTES:
        raise KeyFileError(f"--api-key-file {path}: one key per line, at most 1 MiB")
    return keys


def _require_private(path: Path, info: os.stat_result) -> None:
    from nanocore.protocol.sockets.curve import require_closed  # imports zmq

    # Kubernetes and systemd give a service its key in root's file, readable to a group.
    others, mode = (0o037, "640") if info.st_uid == 0 != os.getuid() else (0o077, "600")
    require_closed(path, info, others if stat.S_ISREG(info.st_mode) else 0, mode)
