"""EndpointLock: ownership of an ipc endpoint.

A second process could bind the same ipc path and steal its clients, and socket files follow the
umask. So an engine's socket lies in a directory of mode 0700, next to a file that is locked for the
engine's life. Endpoints are typed by people, so only stale sockets are removed, and only lock files
are written. TCP endpoints need no lock: the kernel allows one listener per address.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
from pathlib import Path
from typing import Final

from nanocore.protocol.endpoint import IPC, default_endpoint, ipc_address, remove_stale_socket
from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.system.private_directory import make_private

_WHAT: Final = "the endpoint's directory"
_LOCK_CONTENT: Final = re.compile(rb"\d{0,30}\n?")
_GRACE_S: Final = 5.0
"""Time for the last holder of a lock to exit."""


def own_default_endpoint() -> str:
    """Return the user's default endpoint for a client, and check its directory.

    In /tmp, another user could otherwise run an engine there.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others.
    """
    endpoint = default_endpoint()
    make_private(ipc_address(endpoint).path.parent, _WHAT)
    return endpoint


class EndpointLock:
    """Ownership of an endpoint, from construction to `release`.

    Args:
        flag: names the endpoint in errors.
        patient: wait, maybe for ever, until no other process serves there.

    Attributes:
        last_holder: pid of the process that held the lock before, if known.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others; or another
            file has the name of the socket or the lock.
        AddressInUseError: another process serves there; the message has its pid if known.
    """

    def __init__(self, endpoint: str, flag: str = "--listen", patient: bool = False) -> None:
        address = ipc_address(endpoint)
        self.path = address.path
        self._remedy = f"choose another endpoint with {flag} {IPC}/path/{self.path.name}"
        make_private(self.path.parent, _WHAT)
        self._fd = -1
        self.last_holder: int | None = None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(address.lock_path, flags, 0o600)
            self._take(endpoint, address.lock_path, patient)
            if patient:
                _wait_until_gone(self.last_holder)
            remove_stale_socket(
                self.path,
                f"endpoint {endpoint!r}: {self.path}",
                f"endpoint {endpoint} is served by a process without a lock: stop it, or ",
                self._remedy,
            )
        except OSError as error:
            self._close()
            raise ConfigError(
                f"endpoint {endpoint!r}: {error.filename or address.lock_path}: {error.strerror}; "
                f"{self._remedy}"
            ) from None
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        """Remove the socket file and let others serve here. Idempotent."""
        if self._fd < 0:
            return
        # The lock file stays: removing it would let two engines lock different inodes.
        if self.path.is_socket():
            self.path.unlink()
        self._close()

    def _take(self, endpoint: str, lock_path: Path, patient: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ConfigError(
                f"endpoint {endpoint!r}: {lock_path} is not a regular file; {self._remedy}"
            )
        self._read_holder(endpoint, lock_path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = self.last_holder or "unknown"
            raise AddressInUseError(
                f"endpoint {endpoint} is served by process {holder}: stop it, or {self._remedy}"
            ) from None
        self._read_holder(endpoint, lock_path)  # another process may have held it meanwhile
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _read_holder(self, endpoint: str, lock_path: Path) -> None:
        """Read the last holder's pid; raise ConfigError if the file is not a lock."""
        content = os.pread(self._fd, 32, 0)
        if not _LOCK_CONTENT.fullmatch(content):
            raise ConfigError(
                f"endpoint {endpoint!r}: {lock_path} is not a lock of ours and would be "
                f"overwritten; {self._remedy}"
            )
        self.last_holder = int(content) if content.strip() else None

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _wait_until_gone(pid: int | None) -> None:
    """Wait for the exit of a process, which releases its sockets and memory."""
    if pid is None or pid == os.getpid():
        return
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return  # it has exited, or is in another pid namespace
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_GRACE_S * 1e3)
    finally:
        os.close(pidfd)
