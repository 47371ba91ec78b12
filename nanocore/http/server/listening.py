"""Listening sockets for each process of a server, bound before anything else starts.

Loopback and Unix sockets are reachable from this machine only; other addresses require API keys. A
name is resolved once, so that the checked addresses are those bound. Several processes each have a
socket at the same port, and the kernel distributes connections; they share a Unix socket.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from nanocore.protocol.endpoint import remove_stale_socket
from nanocore.protocol.errors import AddressInUseError, ConfigError

BACKLOG: Final = 2048
Address = tuple[socket.AddressFamily, str]
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ATTEMPTS: Final = 20


def resolve(host: str, has_keys: bool) -> list[Address]:
    """Return the addresses of a host to bind to.

    Raises:
        ConfigError: there are none; or one is not loopback and there are no API keys.
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
            f"--host {where}: anybody who reaches this address could use the model; set API keys "
            "with --api-key-file FILE, NANOCORE_API_KEY or --api-key KEY, or leave --host out to "
            "listen at 127.0.0.1"
        )
    return addresses


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def listen(
    addresses: Sequence[Address], port: int, num_processes: int
) -> list[list[socket.socket]]:
    """Return each process's sockets listening at a port; port 0 is any free one.

    Raises:
        AddressInUseError: another process listens there.
        ConfigError: the address is not of this machine, or the user may not bind it.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _listen(addresses, port, num_processes)
        except OSError as error:
            where = f"{addresses[0][1]}, port {port}"
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"cannot listen at {where}: {os.strerror(error.errno or 0)}: choose another "
                    "--host or --port"
                ) from None
            if port or attempt == _ATTEMPTS - 1:
                raise AddressInUseError(
                    f"{where} is in use: stop the process using it, or choose another --port (0 is "
                    "any free one)"
                ) from None
    raise AssertionError


def _listen(
    addresses: Sequence[Address], port: int, num_processes: int
) -> list[list[socket.socket]]:
    shared = num_processes > 1
    with ExitStack() as failing:
        if shared:
            # SO_REUSEPORT would silently join another server of this user, so bind without it once.
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
    sockets: list[socket.socket] = []
    refusal = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, text in addresses:
        try:
            sock = socket.create_server(
                (text, port), family=family, backlog=BACKLOG, reuse_port=shared
            )
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            refusal = error
            continue
        failing.callback(sock.close)
        sock.setblocking(False)
        port = sock.getsockname()[1]
        sockets.append(sock)
    if not sockets:
        raise refusal
    return sockets


def listen_unix(path: str, has_keys: bool, num_processes: int) -> list[list[socket.socket]]:
    """Return a Unix socket shared by all processes; without API keys only its owner may connect.

    Raises:
        AddressInUseError: another process listens there.
        ConfigError: the path cannot be bound, or is another kind of file.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o111 if has_keys else 0o177)
    try:
        where, remedy = f"--uds {path}", "choose another path"
        remove_stale_socket(Path(path), where, f"{where} is in use by another process: ", remedy)
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
