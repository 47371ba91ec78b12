"""Endpoint names: where an engine listens by default, and which names no socket can have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanocore.protocol.endpoint import TcpAddress, default_endpoint, ipc_address, listen_address
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets.engine_socket import bind_engine_socket


def test_the_default_endpoint_is_in_the_users_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_endpoint() == "ipc:///run/user/1000/nanocore/default/engine.sock"
    assert default_endpoint("eval") == "ipc:///run/user/1000/nanocore/eval/engine.sock"


@pytest.mark.parametrize("runtime", [None, ""])
def test_without_a_runtime_dir_the_default_endpoint_is_in_tmp_by_user(
    monkeypatch: pytest.MonkeyPatch, runtime: str | None
) -> None:
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert default_endpoint() == "ipc:///tmp/nanocore-1234/default/engine.sock"


def test_the_file_behind_an_ipc_endpoint_is_its_path() -> None:
    assert ipc_address("ipc:///run/x/engine.sock").path == Path("/run/x/engine.sock")


@pytest.mark.parametrize(
    "endpoint", ["inproc://x", "", "/run/x.sock", "IPC:///x", "TCP://127.0.0.1:5555", "udp://x:1"]
)
def test_any_other_transport_is_refused_with_the_remedy(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"use ipc:///path/engine\.sock") as caught:
        listen_address(endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize("path", ["", "*", "engine.sock", "./engine.sock", "@abstract"])
def test_a_path_that_is_not_absolute_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        ipc_address(f"ipc://{path}")


@pytest.mark.parametrize(
    "path", ["/", "//", "/run/x/..", "/run/x/engine.lock", "/run/a\0b", "/run/a\nb", "/run/\udcff"]
)
def test_a_path_that_can_be_no_sockets_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"use ipc:///path/engine\.sock") as caught:
        ipc_address(f"ipc://{path}")
    assert repr(f"ipc://{path}") in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 107, "é" * 54])
def test_a_path_too_long_for_a_unix_socket_is_refused_with_both_lengths(name: str) -> None:
    with pytest.raises(ConfigError, match=r"at most 107 bytes; this one has 10[89]"):
        ipc_address(f"ipc:///{name}")


def test_the_longest_path_accepted_can_be_bound(short_path: Path) -> None:
    padding = 107 - len(os.fsencode(short_path)) - 1
    endpoint = f"ipc://{short_path}/{'x' * padding}"
    path = ipc_address(endpoint).path
    assert len(os.fsencode(path)) == 107
    bind_engine_socket(endpoint).close()
    with pytest.raises(ConfigError):
        ipc_address(endpoint + "x")


def test_where_only_files_can_be_served_tcp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use ipc:///path/engine\.sock"):
        ipc_address("tcp://127.0.0.1:5555")


@pytest.mark.parametrize(
    ("endpoint", "address", "is_every_interface"),
    [
        ("tcp://127.0.0.1:5555", TcpAddress("127.0.0.1", 5555), False),
        ("tcp://[::1]:65535", TcpAddress("::1", 65535), False),
        ("tcp://0.0.0.0:1", TcpAddress("0.0.0.0", 1), True),
        ("tcp://[::]:5555", TcpAddress("::", 5555), True),
    ],
)
def test_a_tcp_endpoint_is_an_ip_address_and_a_port(
    endpoint: str, address: TcpAddress, is_every_interface: bool
) -> None:
    assert listen_address(endpoint) == address
    assert address.is_every_interface is is_every_interface


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("127.0.0.1", "needs a port"),
        ("127.0.0.1:", "needs a port"),
        ("127.0.0.1:0", "needs a port"),
        ("127.0.0.1:*", "needs a port"),
        ("127.0.0.1:65536", "needs a port"),
        ("127.0.0.1:-1", "needs a port"),
        ("[::1]", "needs a port"),
        ("127.0.0.1:\u0665", "needs a port"),
        ("*:5555", "does not say where"),
        (":5555", "does not say where"),
        ("localhost:5555", "IP address"),
        ("eth0:5555", "IP address"),
        ("lo;127.0.0.1:5555", "IP address"),
        ("127.1:5555", "IP address"),
        (" 127.0.0.1:5555", "IP address"),
        ("[*]:5555", "IP address"),
        ("::1:5555", "brackets"),
        ("[127.0.0.1]:5555", "brackets"),
    ],
)
def test_a_tcp_endpoint_that_does_not_say_exactly_where_is_refused(rest: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        listen_address(f"tcp://{rest}")
    assert repr(f"tcp://{rest}") in str(caught.value)
