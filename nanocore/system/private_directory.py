"""Directories of mode 0700, for endpoints, logs and fetched files; and files in them."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from nanocore.protocol.errors import ConfigError


def make_private(directory: Path, what: str) -> None:
    """Make a directory of mode 0700, or check an existing one. what: names it in errors.

    Raises:
        ConfigError: it cannot be made, is a symlink, another user's, or open to others.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        info, parent = directory.lstat(), directory.parent.stat()
    except FileExistsError as error:
        raise ConfigError(f"{what} {directory}: {error.filename} is not a directory") from None
    except OSError as error:
        raise ConfigError(f"{what} {directory}: {error.strerror}") from None
    problem = None
    # Who can write to the parent could replace the directory.
    if parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX:
        problem = f"lies in {directory.parent}, which other users can write to"
    elif parent.st_uid not in (0, os.getuid()):
        problem = f"lies in {directory.parent}, which belongs to user {parent.st_uid}"
    elif not stat.S_ISDIR(info.st_mode):
        problem = "is not a directory (a symlink is not followed)"
    elif info.st_uid != os.getuid():
        problem = f"belongs to user {info.st_uid}, not to user {os.getuid()}"
    elif info.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(info.st_mode):04o}, open to other users; use 0700"
    if problem:
        raise ConfigError(f"{what} {directory} {problem}")


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file; O_CREAT makes it with mode 0600.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a directory.
    """
    try:
        # Not blocking: a pipe in a file's place would wait for a writer.
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader
            raise
    raise OSError(errno.EINVAL, "not a regular file")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 atomically, under a name that begins with a dot and then under its
    own; raises OSError if that fails."""
    fd, beside = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
