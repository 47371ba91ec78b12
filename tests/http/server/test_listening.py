"""Where servers listen: who may without a key, who shares a port, and what is never removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from nanocore.http.server import listening
from nanocore.http.server.listening import listen, listen_unix, resolve
from nanocore.protocol.errors import AddressInUseError, ConfigError

LOOPBACK = [(socket.AF_INET, "127.0.0.1")]


def close(processes: list[list[socket.socket]]) -> None:
    for sock in (sock for sockets in processes for sock in sockets):
        sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host: str) -> None:
    ((_, address),) = resolve(host, has_keys=False)
    assert address == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .*anybody who reaches this .*--api-key-file"):
        resolve(host, has_keys=False)
    assert resolve(host, has_keys=True)


def test_a_name_that_means_others_too_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
            for address in ("127.0.0.1", "192.0.2.7")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(ConfigError, match=r"--host box \(192\.0\.2\.7\)"):
        resolve("box", has_keys=False)
    assert [address for _, address in resolve("box", has_keys=True)] == ["127.0.0.1", "192.0.2.7"]


@pytest.mark.parametrize("host", ["", "no such name", "a" * 300, "256.0.0.1.example.invalid"])
def test_what_names_no_address_is_said(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host.endswith(".invalid"):

        def unknown(*_: object, **__: object) -> object:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="--host"):
        resolve(host, has_keys=True)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_port_that_somebody_listens_at_is_in_use(num_processes: int) -> None:
    """Also if they are ours, and would share it."""
    first = listen(LOOPBACK, 0, 3)
    port = first[0][0].getsockname()[1]
    assert {sock.getsockname()[1] for (sock,) in first} == {port}
    with pytest.raises(AddressInUseError, match=rf"port {port} is in use.*--port"):
        listen(LOOPBACK, port, num_processes)
    close(first)
    close(listen(LOOPBACK, port, num_processes))


def test_processes_share_connections_out() -> None:
    processes = listen(LOOPBACK, 0, 2)
    address = processes[0][0].getsockname()
    clients = [socket.create_connection(address) for _ in range(64)]
    for (sock,) in processes:
        sock.setblocking(True)
        accepted, _ = sock.accept()
        accepted.close()
    for client in clients:
        client.close()
    close(processes)


def test_all_addresses_of_a_name_get_one_port_but_for_those_the_machine_has_not() -> None:
    both = [*LOOPBACK, (socket.AF_INET, "127.0.0.2")]
    ((first, second),) = processes = listen(both, 0, 1)
    assert first.getsockname()[1] == second.getsockname()[1]
    close(processes)

    ((sock,),) = processes = listen([(socket.AF_INET, "192.0.2.7"), *LOOPBACK], 0, 1)
    assert sock.getsockname()[0] == "127.0.0.1"
    close(processes)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.7"):
        listen([(socket.AF_INET, "192.0.2.7")], 0, 1)


@pytest.mark.parametrize(("has_keys", "mode"), [(False, 0o600), (True, 0o666)])
def test_a_unix_socket_is_its_owners_unless_there_are_keys(
    short_path: Path, has_keys: bool, mode: int
) -> None:
    path = short_path / "http.sock"
    mask = os.umask(0o022)
    try:
        processes = listen_unix(str(path), has_keys, 2)
    finally:
        assert os.umask(mask) == 0o022
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(AddressInUseError, match="in use by another process"):
        listen_unix(str(path), has_keys, 1)
    close(processes)
    close(listen_unix(str(path), has_keys, 1))  # what one that was killed has left


def test_a_file_in_a_unix_sockets_place_stays(short_path: Path) -> None:
    path = short_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        listen_unix(str(path), False, 1)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"--uds .*: "):
        listen_unix(str(short_path / "none" / "http.sock"), False, 1)
    with pytest.raises(ConfigError, match=r"--uds .*: "):
        listen_unix(str(short_path / ("a" * 200)), False, 1)


def test_a_free_port_that_is_taken_meanwhile_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = listening._bound
    ports = []

    def bind(addresses: object, port: int, shared: bool, failing: object) -> list[socket.socket]:
        ports.append(port)
        if len(ports) == 2:
            raise OSError(98, "Address already in use")
        return bound(addresses, port, shared, failing)  # type: ignore[arg-type]

    monkeypatch.setattr(listening, "_bound", bind)
    close(listen(LOOPBACK, 0, 2))
    assert ports[:3] == [0, ports[1], 0]
