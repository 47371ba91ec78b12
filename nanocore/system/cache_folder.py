"""The user's cache folder: what one start makes and later ones can use.

It is $XDG_CACHE_HOME/nanocore, by default ~/.cache/nanocore, with a folder of mode 0700 for each
kind of entry: `files` has contents by their SHA-256, which is checked on reading, and `converted`
says which of them were made of which model. An entry is written under another name, then renamed,
and never changes; deleting it is safe at any time, for it is made again. When the folder exceeds
its limit, the entries that were used longest ago are deleted. If it cannot be used, a start goes on
without it and says so in a line.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from nanocore.protocol.errors import ConfigError, StartFile
from nanocore.system.private_directory import make_private, open_regular, replace_file

logger = logging.getLogger(__name__)

LIMIT_NAME: Final = "NANOCORE_CACHE_BYTES"
_DEFAULT_LIMIT_BYTES: Final = 2 * 10**9
_MAX_UNFINISHED_S: Final = 3600.0
"""Age at which a file under another name was left behind by a process that was killed."""


def cache_root() -> Path:
    """Return the cache folder, which need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "nanocore"


class CacheEntry(NamedTuple):
    """A file in the cache folder. used_s: time of its last use, in seconds of the epoch."""

    path: Path
    num_bytes: int
    used_s: float

    @property
    def kind(self) -> str:
        return self.path.parent.name

    @property
    def is_unfinished(self) -> bool:
        return self.path.name.startswith(".")

    def delete(self) -> bool:
        """Return whether it could be deleted."""
        try:
            self.path.unlink(missing_ok=True)
            return True
        except OSError:
            return False


def cache_entries(root: Path | None = None) -> list[CacheEntry]:
    """Return all files of the cache folder, the one that was used longest ago first."""
    return sorted(_entries(root or cache_root()), key=lambda entry: entry.used_s)


def _entries(root: Path) -> Iterator[CacheEntry]:
    with suppress(OSError):
        for path in root.glob("*/*"):
            # Another process may delete one meanwhile.
            with suppress(OSError):
                info = path.lstat()
                if path.is_file() and not path.parent.is_symlink():
                    yield CacheEntry(path, info.st_size, info.st_mtime)


def limit_bytes() -> int:
    """Return the size limit of the cache folder: NANOCORE_CACHE_BYTES, or 2 GB."""
    text = os.environ.get(LIMIT_NAME, "")
    if text.isdecimal():
        return int(text)
    if text:
        _warn_once(f"{LIMIT_NAME}={text} is no number of bytes: 2 GB is the limit")
    return _DEFAULT_LIMIT_BYTES


class CacheFolder:
    """Files of one kind, by names that the caller has checked.

    Args:
        kind: name of the folder. purpose: what happens without it, for the log.
        directory: None is `cache_root` / kind.
    """

    def __init__(self, kind: str, purpose: str, directory: Path | None = None) -> None:
        self._named_directory = directory or cache_root() / kind
        self._purpose = purpose

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return a file's content, at most max_bytes + 1 of it; None if there is none."""
        if self._directory is None:
            return None
        path = self._directory / name
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                content = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"{path}: {error.strerror}; {self._purpose}")
            return None
        with suppress(OSError):
            os.utime(path)  # it was used
        return content

    def has(self, name: str) -> bool:
        """Whether there is such a file, damaged or not."""
        return self._directory is not None and (self._directory / name).is_file()

    def write(self, name: str, content: bytes) -> None:
        """Store a file, if that is possible and it fits the limit."""
        if self._directory is None:
            return
        if len(content) > limit_bytes():
            self._keep_limit(name)  # the limit may be less than it was
            return
        try:
            replace_file(self._directory / name, content)
        except OSError as error:
            _warn_once(f"{self._directory}: {error.strerror}; {self._purpose}")
        self._keep_limit(name)

    def _keep_limit(self, written: str) -> None:
        assert self._directory is not None
        entries, most = cache_entries(self._directory.parent), limit_bytes()
        num_bytes = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if entry.is_unfinished:
                is_old = entry.used_s < time.time() - _MAX_UNFINISHED_S
            else:
                is_old = num_bytes > most and entry.path.name != written
            if is_old and entry.delete():
                num_bytes -= entry.num_bytes

    @cached_property
    def _directory(self) -> Path | None:
        directory = self._named_directory
        try:
            if not directory.is_absolute():
                raise ConfigError(f"the cache folder {directory} is no absolute path")
            make_private(directory, "the cache folder")
        except ConfigError as error:
            _warn_once(f"{error}: {self._purpose}")
            return None
        return directory


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


class FileCache(CacheFolder):
    """Contents of files by their SHA-256: 64 lower-case hex digits, as checked by the caller.

    Args:
        directory: None is the user's, see above.
    """

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__("files", "files are fetched at each start", directory)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content with this digest, or None if it is not cached."""
        content = super().read(name, max_bytes)
        if content is not None and hashlib.sha256(content).hexdigest() != name:
            logger.warning(
                "the cached file %s does not have the digest in its name: it is fetched again",
                name,
            )
            return None
        return content

    def read_all(self, files: Iterable[StartFile]) -> dict[str, bytes] | None:
        """Return the contents of these files by name, or None if one is not cached."""
        contents: dict[str, bytes] = {}
        for file in files:
            content = self.read(file.sha256, file.num_bytes)
            if content is None:
                return None
            contents[file.name] = content
        return contents
