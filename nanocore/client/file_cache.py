"""What clients fetched from engines, kept on disk by content: each file's name is its SHA-256.

Shared by all processes of the user, in a directory that is the user's alone. Nothing in it is
trusted: content is handed out only if it has the digest that it is filed under. Files appear whole
(written beside, then renamed) and are never changed; whoever deletes them, or the directory, loses
nothing. A cache that cannot be used stops nobody: it says so in the log, and files are fetched.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from functools import cached_property
from pathlib import Path

from nanocore.protocol.errors import ConfigError
from nanocore.system.private_directory import make_private

logger = logging.getLogger(__name__)


class FileCache:
    """Contents by digest. A digest is 64 lower-case hex digits; the caller has checked that.

    Args:
        directory: None is $XDG_CACHE_HOME/nanocore/files, by default below ~/.cache.
    """

    def __init__(self, directory: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._named_directory = directory or Path(home) / "nanocore" / "files"

    def read(self, sha256: str, num_bytes: int) -> bytes | None:
        """The content of this digest and size, or None if the cache does not have it."""
        if self._directory is None:
            return None
        path = self._directory / sha256
        try:
            with path.open("rb") as file:
                content = file.read(num_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s: %s; the file is fetched again", path, error.strerror)
            return None
        if hashlib.sha256(content).hexdigest() != sha256:
            logger.warning("%s does not have the digest in its name: it is fetched again", path)
            return None
        return content

    def write(self, sha256: str, content: bytes) -> None:
        """Keep a content, if that is possible."""
        if self._directory is None:
            return
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self._directory, prefix=".")
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                os.replace(temporary, self._directory / sha256)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning(
                "%s: %s; files are fetched at each start", self._directory, error.strerror
            )

    @cached_property
    def _directory(self) -> Path | None:
        """The directory, made if need be; None if it cannot be used."""
        directory = self._named_directory
        try:
            if not directory.is_absolute():
                raise ConfigError(f"the file cache {directory} is no absolute path")
            make_private(directory, "the file cache")
        except ConfigError as error:
            logger.warning("%s: files are fetched at each start", error)
            return None
        return directory
