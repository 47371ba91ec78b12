"""EndpointLock: who serves at an ipc endpoint, and the private directory that it lies in.

ZeroMQ lets a second process bind an ipc path silently and steal its clients, and its socket file
follows the umask. So an engine's socket lies in a directory of mode 0700 that belongs to the user,
and an flock beside it, held for the engine's life, says who serves there. TCP endpoints have
none: the kernel lets only one process listen at an address.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from nanocore.protocol.endpoint import default_endpoint, ipc_address
from nanocore.protocol.errors import AddressInUseError, ConfigError


def own_default_endpoint() -> str:
    """The user's default endpoint, for a client: its directory is made, or found to be the user's.

    In /tmp, another user could otherwise have put an engine of his own there.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others.
    """
    endpoint = default_endpoint()
    _make_private(ipc_address(endpoint).path.parent)
    return endpoint


class EndpointLock:
    """Ownership of an endpoint, from construction to `release`.

    flag: names the endpoint in error messages.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others.
        AddressInUseError: another process holds the lock; the message names its pid.
    """

    def __init__(self, endpoint: str, flag: str = "--listen") -> None:
        address = ipc_address(endpoint)
        self.path = address.path
        _make_private(self.path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(address.lock_path, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AddressInUseError(
                f"endpoint {endpoint} is served by process {holder}: stop it, or choose another "
                f"endpoint with {flag} ipc:///path/{self.path.name}"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the socket file and let others serve here. Idempotent."""
        if self._fd < 0:
            return
        # The lock file stays: removing it would let two engines lock different inodes.
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _make_private(directory: Path) -> None:
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        info, parent = directory.lstat(), directory.parent.stat()
    except OSError as error:
        raise ConfigError(f"the endpoint's directory {directory}: {error.strerror}") from None
    problem = None
    # Whoever can write to the parent could put a directory of his own in our place.
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
        raise ConfigError(f"the endpoint's directory {directory} {problem}")
