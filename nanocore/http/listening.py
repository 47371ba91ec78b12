"""Where a server listens: sockets for each of its processes, bound before anything else starts.

Loopback and Unix sockets are for those who are on this machine; whatever else is bound needs an API
key. What is bound is what was looked at: a name is resolved once. Several processes have sockets of
their own at one port, among which the kernel shares connections out; at a Unix socket they share.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from nanocore.http.server import BACKLOG
from nanocore.protocol.errors import AddressInUseError, ConfigError

Address = tuple[socket.AddressFamily, str]
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ATTEMPTS: Final = 20


def resolve(host: str, has_keys: bool) -> list[Address]:
    """The addresses of a host to bind to.

    Raises:
        ConfigError: there are none; or others could reach one of them, and there are no API keys.
    """
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--host {host!r} names no address: {text}") from None
    addresses: list[Address] = list(
        dict.fromkeys((family, str(name[0])) for family, *_, name in found)
    )
    if not host:
        raise ConfigError("--host needs an address or a name, such as 127.0.0.1")
    open_to_others = [text for _, text in addresses if not _is_loopback(text)]
    if open_to_others and not has_keys:
        where = host if host in open_to_others else f"{host} ({', '.join(open_to_others)})"
        raise ConfigError(
            f"--host {where}: whoever reaches this address could use the model; give API keys with "
            "--api-key-file FILE, NANOCORE_API_KEY or --api-key KEY, or leave --host out to listen "
            "at 127.0.0.1"
        )
    return addresses


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def listen(
    addresses: Sequence[Address], port: int, num_processes: int
) -> list[list[socket.socket]]:
    """Sockets that listen at a port, those of each process; port 0 is any that is free.

    Raises:
        AddressInUseError: somebody else listens there.
        ConfigError: this is no address of this machine, or not for this user.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _listen(addresses, port, num_processes)
        except OSError as error:
            where = f"{addresses[0][1]}, port {port}"
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"cannot listen at {where}: {error.strerror}: choose another --host or --port"
                ) from None
            if port or attempt == _ATTEMPTS - 1:
                raise AddressInUseError(
                    f"{where} is in use: stop who listens there, or choose another --port (0 is "
                    "any that is free)"
                ) from None
    raise AssertionError


def _listen(
    addresses: Sequence[Address], port: int, num_processes: int
) -> list[list[socket.socket]]:
    shared = num_processes > 1
    with ExitStack() as failing:
        if shared:  # sockets that share a port would join those of another server of this user
            port = _bound(addresses, port, False, failing)[0].getsockname()[1]
            failing.close()
        processes = []
        for _ in range(num_processes):
            processes.append(_bound(addresses, port, shared, failing))
            port = processes[0][0].getsockname()[1]
        failing.pop_all()
    return processes


def _bound(
    addresses: Sequence[Address], port: int, shared: bool, failing: ExitStack
) -> list[socket.socket]:
    """A listening socket for each address that this machine has."""
    sockets: list[socket.socket] = []
    refusal = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, text in addresses:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # of a family that this machine has not
            refusal = error
            continue
        failing.callback(sock.close)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((text, port))
            sock.listen(BACKLOG)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            sock.close()
            refusal = error
            continue
        sock.setblocking(False)
        port = sock.getsockname()[1]
        sockets.append(sock)
    if not sockets:
        raise refusal
    return sockets


def listen_unix(path: str, has_keys: bool, num_processes: int) -> list[list[socket.socket]]:
    """A Unix socket, the same for each process: its owner's alone unless there are API keys.

    Raises:
        AddressInUseError: somebody listens there.
        ConfigError: no socket can lie there, or something else does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o111 if has_keys else 0o177)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
        raise
    finally:
        os.umask(mask)
    return [[sock if index == 0 else sock.dup()] for index in range(num_processes)]


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed, and only that."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: there is a file that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as visitor:
        try:
            visitor.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except OSError:
            pass
    raise AddressInUseError(f"--uds {path}: another process listens there; choose another path")
