"""Endpoint names: where an engine listens by default, and which names no socket can have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanocore.protocol.endpoint import default_endpoint, socket_path
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets import EngineSocket


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
    assert socket_path("ipc:///run/x/engine.sock") == Path("/run/x/engine.sock")


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "inproc://x", "", "/run/x.sock", "IPC:///x"]
)
def test_any_transport_but_ipc_is_refused_with_the_remedy(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"use ipc:///path/engine\.sock") as caught:
        socket_path(endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize("path", ["", "*", "engine.sock", "./engine.sock", "@abstract"])
def test_a_path_that_is_not_absolute_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        socket_path(f"ipc://{path}")


@pytest.mark.parametrize("name", ["x" * 107, "é" * 54])
def test_a_path_too_long_for_a_unix_socket_is_refused_with_both_lengths(name: str) -> None:
    with pytest.raises(ConfigError, match=r"at most 107 bytes; this one has 10[89]"):
        socket_path(f"ipc:///{name}")


def test_the_longest_path_accepted_can_be_bound(short_path: Path) -> None:
    padding = 107 - len(os.fsencode(short_path)) - 1
    endpoint = f"ipc://{short_path}/{'x' * padding}"
    path = socket_path(endpoint)
    assert len(os.fsencode(path)) == 107
    EngineSocket(endpoint).close()
    with pytest.raises(ConfigError):
        socket_path(endpoint + "x")
