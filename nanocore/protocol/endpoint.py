"""The names of endpoints, for both transports: ipc:///path/engine.sock and tcp://ADDRESS:PORT.

An ipc endpoint is a file in a private directory, and needs no keys (`nanocore.protocol.
endpoint_lock`). A TCP endpoint can be reached by anybody, and therefore needs CURVE keys
(`nanocore.protocol.sockets.curve`). An engine is told the address to listen at; it never guesses
one, and no wildcard stands for all of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Final

import msgspec

from nanocore.protocol.errors import AddressInUseError, ConfigError

IPC: Final = "ipc://"
TCP: Final = "tcp://"
MAX_IPC_PATH_BYTES: Final = 107  # sun_path in Linux's sockaddr_un, without its final zero
_LOCK_SUFFIX: Final = ".lock"


class IpcAddress(msgspec.Struct, frozen=True):
    """A Unix socket; path is absolute."""

    path: Path

    @property
    def lock_path(self) -> Path:
        """The file whose flock says who serves here; names that share it conflict."""
        return self.path.with_suffix(_LOCK_SUFFIX)


class TcpAddress(msgspec.Struct, frozen=True):
    """An IP address (no host name, no brackets) and a port that an engine listens at."""

    host: str
    port: int

    @property
    def is_every_interface(self) -> bool:
        """Whether this is 0.0.0.0 or ::, which every network of the machine reaches."""
        return ipaddress.ip_address(self.host).is_unspecified


def runtime_directory() -> Path:
    """Return the directory of the user's endpoints, which may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "nanocore" if runtime else Path(f"/tmp/nanocore-{os.getuid()}")


def default_endpoint(name: str = "default") -> str:
    """Return the ipc endpoint of the user's engine called `name`."""
    return f"{IPC}{runtime_directory() / name / 'engine.sock'}"


def listen_address(endpoint: str) -> IpcAddress | TcpAddress:
    """Parse an engine's endpoint.

    Raises:
        ConfigError: neither transport, or nothing that can be listened at.
    """
    if endpoint.startswith(TCP):
        return _tcp_address(endpoint)
    if not endpoint.startswith(IPC):
        raise ConfigError(
            f"endpoint {endpoint!r} has an unknown scheme: use {IPC}/path/engine.sock, or "
            f"{TCP}ADDRESS:PORT with keys"
        )
    return ipc_address(endpoint)


def ipc_address(endpoint: str) -> IpcAddress:
    """Parse an ipc endpoint.

    Raises:
        ConfigError: not an ipc endpoint, or a path that no Unix socket can have.
    """
    if not endpoint.startswith(IPC):
        raise ConfigError(
            f"endpoint {endpoint!r} cannot be served, only ipc endpoints can: use "
            f"{IPC}/path/engine.sock"
        )
    name = endpoint.removeprefix(IPC)
    num_bytes = len(os.fsencode(name))
    if not name.startswith("/") or num_bytes > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"endpoint {endpoint!r} must name an absolute path of at most {MAX_IPC_PATH_BYTES} "
            f"bytes; this one has {num_bytes}"
        )
    path = Path(name)
    if not name.isprintable() or path.name in ("", "..") or path.suffix == _LOCK_SUFFIX:
        raise ConfigError(
            f"endpoint {endpoint!r} must end in a printable file name with a suffix other than "
            f"{_LOCK_SUFFIX}; use {IPC}/path/engine.sock"
        )
    return IpcAddress(path)


def remove_stale_socket(path: Path, what: str, in_use: str, remedy: str) -> None:
    """Remove the socket of a killed process, and nothing else. The other arguments: for errors.

    Raises:
        ConfigError: it is another kind of file. AddressInUseError: a process listens there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{what} exists and is not a socket: {remedy}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as visitor:
        try:
            visitor.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # another type of socket, or a full backlog
            pass
    raise AddressInUseError(f"{in_use}{remedy}")


def _tcp_address(endpoint: str) -> TcpAddress:
    host, colon, port = endpoint.removeprefix(TCP).rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    problem = None
    if not colon or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        problem = "needs a port from 1 to 65535"
    elif host in ("", "*"):
        problem = (
            "does not say where to listen: give an address of this machine (every interface has "
            "to be asked for by its name, 0.0.0.0)"
        )
    else:
        try:
            version = ipaddress.ip_address(host[1:-1] if bracketed else host).version
        except ValueError:
            problem = f"must name an IP address of this machine; {host!r} is none"
        else:
            if bracketed != (version == 6):
                problem = "must have brackets around an IPv6 address, and around no other"
    if problem:
        raise ConfigError(f"endpoint {endpoint!r} {problem}; for example {TCP}192.0.2.7:5555")
    return TcpAddress(host[1:-1] if bracketed else host, int(port))
