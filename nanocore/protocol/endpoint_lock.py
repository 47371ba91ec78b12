"""EndpointLock: who serves at an ipc endpoint.

ZeroMQ lets a second process bind an ipc path silently and steal its clients, and its socket file
follows the umask. So an engine's socket lies in a directory of mode 0700 that belongs to the user,
and an flock beside it, held for the engine's life, says who serves there. TCP endpoints have
none: the kernel lets only one process listen at an address.
"""

from __future__ import annotations

import fcntl
import os

from nanocore.protocol.endpoint import default_endpoint, ipc_address
from nanocore.protocol.errors import AddressInUseError
from nanocore.protocol.private_directory import make_private

_WHAT = "the endpoint's directory"


def own_default_endpoint() -> str:
    """The user's default endpoint, for a client: its directory is made, or found to be the user's.

    In /tmp, another user could otherwise have put an engine of his own there.

    Raises:
        ConfigError: the directory is a symlink, another user's, or open to others.
    """
    endpoint = default_endpoint()
    make_private(ipc_address(endpoint).path.parent, _WHAT)
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
        make_private(self.path.parent, _WHAT)
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
