"""Key files: what is read from them, and every way in which they cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nanocore.protocol.errors import ConfigError, KeyFileError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys, client_keys
from tests.protocol.keys import KeyFolders, make_key_folders

TCP = "tcp://127.0.0.1:5555"


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolders:
    folders = make_key_folders(tmp_path)
    folders.client("alice")
    return folders


def load_engine(keys: KeyFolders) -> EngineKeys:
    return EngineKeys.load(keys.engine)


def load_client(keys: KeyFolders) -> ClientKeys:
    return ClientKeys.load(keys.client("alice"))


def test_a_client_pins_its_engines_key(keys: KeyFolders) -> None:
    engine, client = load_engine(keys), load_client(keys)
    assert client.engine_public_key == engine.public_key
    assert len({engine.public_key, engine.secret_key, client.public_key, client.secret_key}) == 4
    assert {len(key) for key in (engine.secret_key, client.secret_key, client.public_key)} == {40}


def test_a_client_needs_no_file_of_its_own_public_key_but_a_right_one(keys: KeyFolders) -> None:
    """It stands beside the secret, too; PROTOCOL.md asks for two files only."""
    path, loaded = keys.root / "alice" / "client.key", load_client(keys)
    path.write_bytes((keys.root / "alice" / "engine.key").read_bytes())
    with pytest.raises(KeyFileError, match="different pairs"):
        load_client(keys)
    path.unlink()
    assert load_client(keys) == loaded


def test_a_secret_is_in_no_repr(keys: KeyFolders) -> None:
    for loaded in (load_engine(keys), load_client(keys)):
        assert repr(loaded.public_key) in repr(loaded)
        assert loaded.secret_key.decode() not in repr(loaded)


@pytest.mark.parametrize(
    ("file", "load"),
    [
        ("engine/engine.key_secret", load_engine),
        ("engine/engine.key", load_engine),
        ("alice/client.key_secret", load_client),
        ("alice/engine.key", load_client),
    ],
)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "is missing"),
        ("empty", "no public key"),
        ("binary", "no public key"),
        ("short key", "not Z85 text of 40 characters"),
        ("strange characters", "not Z85 text of 40 characters"),
        ("a folder", "cannot be read"),
    ],
)
def test_a_key_file_that_is_none_is_named(
    keys: KeyFolders, file: str, load: Callable[[KeyFolders], object], damage: str, words: str
) -> None:
    path = keys.root / file
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "missing":
        path.touch(mode=0o600)
        path.write_bytes(
            {
                "empty": b"",
                "binary": bytes(range(256)),
                "short key": b'public-key = "' + b"x" * 39 + b'"\n',
                "strange characters": b'public-key = "' + b"~" * 40 + b'"\n',
            }[damage]
        )
    with pytest.raises(KeyFileError, match=words) as caught:
        load(keys)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("place", "load", "right", "wrong", "remedy"),
    [
        ("engine/engine.key_secret", load_engine, 0o600, (0o640, 0o604, 0o620, 0o610, 0o777), 600),
        ("alice/client.key_secret", load_client, 0o600, (0o640, 0o604, 0o620, 0o610, 0o777), 600),
        ("engine", load_engine, 0o755, (0o770, 0o702, 0o777), 700),
        ("engine/clients", load_engine, 0o755, (0o770, 0o702, 0o777), 700),
        ("alice", load_client, 0o755, (0o770, 0o702, 0o777), 700),
        ("engine/engine.key", load_engine, 0o644, (0o664,), 600),
        ("alice/engine.key", load_client, 0o644, (0o664,), 600),
    ],
)
def test_what_others_can_read_or_change_is_refused_with_the_remedy(
    keys: KeyFolders,
    place: str,
    load: Callable[[KeyFolders], object],
    right: int,
    wrong: tuple[int, ...],
    remedy: int,
) -> None:
    path = keys.root / place
    for mode in wrong:
        path.chmod(mode)
        with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod {remedy} {path}$"):
            load(keys)
    path.chmod(right)
    load(keys)


def test_another_users_secret_is_refused(keys: KeyFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keys.client("alice") / "client.key_secret"
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(KeyFileError, match="belongs to user"):
        load_client(keys)


@pytest.mark.parametrize(
    ("missing", "words"), [("engine", "nanocore-keygen"), ("engine/clients", "nanocore-keygen")]
)
def test_an_engine_folder_that_is_not_there_is_named_with_the_remedy(
    keys: KeyFolders, missing: str, words: str
) -> None:
    path = keys.root / missing
    path.rename(keys.root / "away")
    with pytest.raises(KeyFileError, match=f"{path} does not exist.*{words}"):
        load_engine(keys)


def test_halves_of_different_pairs_are_refused(keys: KeyFolders) -> None:
    other = keys.client("bob")
    (other / "client.key").replace(keys.client("alice") / "client.key")
    with pytest.raises(KeyFileError, match="different pairs"):
        load_client(keys)


def test_a_secret_that_is_not_the_public_keys_is_refused(keys: KeyFolders) -> None:
    path = keys.client("alice") / "client.key_secret"
    secret = load_client(keys).secret_key
    path.write_bytes(path.read_bytes().replace(secret, keys.client_keys("bob").secret_key))
    with pytest.raises(KeyFileError, match="no secret key that fits") as caught:
        load_client(keys)
    assert secret.decode() not in str(caught.value)


def test_a_public_file_in_the_secrets_place_is_refused(keys: KeyFolders) -> None:
    folder = keys.client("alice")
    (folder / "client.key_secret").write_bytes((folder / "client.key").read_bytes())
    with pytest.raises(KeyFileError, match="no secret key that fits"):
        load_client(keys)


# -- which endpoints need them --------------------------------------------------------------------


def test_only_tcp_takes_keys(keys: KeyFolders) -> None:
    folder = keys.client("alice")
    assert client_keys(TCP, folder) == client_keys(TCP, str(folder)) == load_client(keys)
    assert client_keys("ipc:///x/engine.sock", None) is None
    with pytest.raises(ConfigError, match="leave curve_dir out"):
        client_keys("ipc:///x/engine.sock", folder)
    with pytest.raises(ConfigError, match="nanocore-keygen DIR --client NAME"):
        client_keys(TCP, None)
