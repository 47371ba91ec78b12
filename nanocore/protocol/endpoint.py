"""Where an engine listens: endpoint names, the private directory, and the lock that owns it.

ZeroMQ lets a second process bind an ipc path silently and steal its clients, and its socket file
follows the umask. So an engine's socket lies in a directory of mode 0700 that belongs to the user,
and an flock beside it, held for the engine's life, says who serves there.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import AddressInUseError, ConfigError

IPC: Final = "ipc://"
MAX_IPC_PATH_BYTES: Final = 107  # sun_path in Linux's sockaddr_un, without its final zero


def default_endpoint(name: str = "default") -> str:
    """ipc endpoint of the user's engine called `name`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "nanocore" if runtime else Path(f"/tmp/nanocore-{os.getuid()}")
    return f"{IPC}{base / name / 'engine.sock'}"


def socket_path(endpoint: str) -> Path:
    """The file behind an ipc endpoint.

    Raises:
        ConfigError: not an ipc endpoint, or a path that no Unix socket can have.
    """
    if not endpoint.startswith(IPC):
        raise ConfigError(
            f"endpoint {endpoint!r} is not served: only ipc:// endpoints are, because a TCP "
            "listener needs keys that this version does not have; use ipc:///path/engine.sock"
        )
    path = endpoint.removeprefix(IPC)
    num_bytes = len(os.fsencode(path))
    if not path.startswith("/") or num_bytes > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"endpoint {endpoint!r} must name an absolute path of at most {MAX_IPC_PATH_BYTES} "
            f"bytes; this one has {num_bytes}"
        )
    return Path(path)


def lock_file(endpoint: str) -> Path:
    """The file whose flock says who serves an ipc endpoint; names that share it conflict."""
    return socket_path(endpoint).with_suffix(".lock")


class EndpointLock:
    """Ownership of an endpoint, from construction to `release`.

    flag: names the endpoint in error messages.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others.
        AddressInUseError: another process holds the lock; the message names its pid.
    """

    def __init__(self, endpoint: str, flag: str = "--listen") -> None:
        self.path = socket_path(endpoint)
        make_private(self.path.parent, "the endpoint's directory")
        lock_path = lock_file(endpoint)
        self._fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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


def make_private(directory: Path, what: str) -> None:
    """Make a directory of mode 0700, or see that it is the user's alone. what: it, in errors.

    Raises:
        ConfigError: it cannot be made, is a symlink, another user's, or open to others.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        info, parent = directory.lstat(), directory.parent.stat()
    except OSError as error:
        raise ConfigError(f"{what} {directory}: {error.strerror}") from None
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
        raise ConfigError(f"{what} {directory} {problem}")
