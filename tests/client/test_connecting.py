"""Connecting: what is refused at once, before anything is sent to anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, ConfigError, KeyFileError
from tests.protocol.keys import make_key_folders

TCP = "tcp://127.0.0.1:5555"


def test_tcp_without_keys_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"needs curve_dir.*nanocore-keygen DIR --client"):
        AsyncEngineClient.connect(TCP)


def test_keys_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=f"{tmp_path}/none does not exist"):
        AsyncEngineClient.connect(TCP, curve_dir=tmp_path / "none")
    with pytest.raises(KeyFileError, match=r"client\.key_secret is missing"):
        AsyncEngineClient.connect(TCP, curve_dir=tmp_path)


def test_keys_for_an_ipc_endpoint_are_refused(tmp_path: Path) -> None:
    folder = make_key_folders(tmp_path).client("alice")
    with pytest.raises(ConfigError, match="is for tcp://"):
        AsyncEngineClient.connect("ipc:///x/engine.sock", curve_dir=folder)


@pytest.fixture
def runtime_dir(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path


def test_the_default_endpoints_directory_is_the_users_before_anybody_listens(
    runtime_dir: Path,
) -> None:
    client = AsyncEngineClient.connect()
    directory = runtime_dir / "nanocore" / "default"
    assert client.endpoint == f"ipc://{directory}/engine.sock"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.getuid()


def test_another_users_engine_at_the_default_endpoint_is_not_joined(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root we can be robbed for real; as another user we must pretend to be a third."""
    directory = runtime_dir / "nanocore" / "default"
    directory.mkdir(mode=0o700, parents=True)
    owner, thief = os.getuid(), os.getuid() + 1
    if owner == 0:
        os.chown(directory, thief, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: thief)
    with pytest.raises(ConfigError, match="belongs to"):
        AsyncEngineClient.connect()
