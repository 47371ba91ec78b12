"""nanocore-keygen: the files it makes, that it never overwrites one, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanocore.keygen import main
from nanocore.protocol.errors import KeyFileError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys


def tree(folder: Path) -> dict[str, int]:
    """Every file and folder below, with its mode."""
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")
    }


@pytest.fixture
def engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """An engine's folder."""
    folder = tmp_path / "keys" / "engine"
    assert main([str(folder)]) == 0
    capsys.readouterr()
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the command says when it does nothing."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nanocore-keygen: ")
    return said.err


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_secrets_and_folders_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    old_umask = os.umask(umask)
    try:
        assert main([str(tmp_path / "e")]) == 0
        assert main([str(tmp_path / "e"), "--client", "alice", "--out", str(tmp_path / "c")]) == 0
    finally:
        os.umask(old_umask)
    public = 0o644
    assert tree(tmp_path) == {
        "e": 0o700,
        "e/engine.key": public,
        "e/engine.key_secret": 0o600,
        "e/clients": 0o700,
        "e/clients/alice.key": public,
        "c": 0o700,
        "c/client.key": public,
        "c/client.key_secret": 0o600,
        "c/engine.key": public,
    }


def test_an_administrators_key_stands_in_a_folder_of_its_own_too(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine), "--client", "a", "--admin", "--out", str(tmp_path / "c")]) == 0
    listed = [engine / folder / "a.key" for folder in ("admins", "clients")]
    assert listed[0].read_text() == listed[1].read_text()
    assert (engine / "admins").stat().st_mode & 0o777 == 0o700
    EngineKeys.load(engine)
    (engine / "admins").chmod(0o770)
    with pytest.raises(KeyFileError, match="open to other users"):
        EngineKeys.load(engine)
    capsys.readouterr()
    assert "--admin needs --client" in refused(capsys, engine, "--admin")


def test_what_it_makes_can_be_loaded_and_fits_together(engine: Path, tmp_path: Path) -> None:
    assert main([str(engine), "--client", "alice", "--out", str(tmp_path / "c")]) == 0
    client = ClientKeys.load(tmp_path / "c")
    assert client.engine_public_key == EngineKeys.load(engine).public_key
    listed = (engine / "clients" / "alice.key").read_text()
    assert client.public_key.decode() in listed
    assert client.secret_key.decode() not in listed


def test_it_prints_what_it_wrote_and_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, out = tmp_path / "e", tmp_path / "c"
    assert main([str(engine)]) == 0
    said = capsys.readouterr().out
    assert f"wrote {engine}/engine.key_secret\n" in said
    assert f"nanocore-keygen {engine} --client NAME" in said
    assert f"--curve-dir {engine}\n" in said
    assert main([str(engine), "--client", "alice", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for path in (out / "client.key_secret", out / "engine.key", engine / "clients" / "alice.key"):
        assert f"wrote {path}\n" in said
    assert f"curve_dir='{out}'" in said
    secrets = (EngineKeys.load(engine).secret_key, ClientKeys.load(out).secret_key)
    assert not any(secret.decode() in said for secret in secrets)


def test_a_clients_folder_is_by_default_its_name_here(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(engine), "--client", "alice"]) == 0
    ClientKeys.load(tmp_path / "alice")


@pytest.mark.parametrize("existing", ["engine.key", "engine.key_secret"])
def test_an_engines_keys_are_never_overwritten(
    tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("mine")
    assert f"{tmp_path / existing} exists" in refused(capsys, tmp_path)
    assert (tmp_path / existing).read_text() == "mine"
    assert {name for name in tree(tmp_path) if "key" in name} == {existing}


@pytest.mark.parametrize("existing", ["client.key", "client.key_secret", "engine.key"])
def test_a_clients_keys_are_never_overwritten(
    engine: Path, tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    out.mkdir()
    (out / existing).write_text("mine")
    said = refused(capsys, engine, "--client", "alice", "--out", out)
    assert f"{out / existing} exists" in said
    assert (out / existing).read_text() == "mine"
    assert set(tree(out)) == {existing}
    assert not any((engine / "clients").iterdir()), "nobody was let in"


def test_a_name_on_the_allow_list_is_never_replaced(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine), "--client", "alice", "--out", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    before = (engine / "clients" / "alice.key").read_bytes()
    assert "alice.key exists" in refused(
        capsys, engine, "--client", "alice", "--out", tmp_path / "two"
    )
    assert (engine / "clients" / "alice.key").read_bytes() == before
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", ["", "a/b", "../alice", "/alice", ".", "..", ".alice", "a\nb"])
def test_a_name_that_is_no_file_name_is_refused(
    engine: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    assert repr(name) in refused(capsys, engine, "--client", name, "--out", tmp_path / "c")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "DIR"),
        (["DIR", "--out", "x"], "--out x needs --client"),
        (["DIR", "--no-such-flag"], "--no-such-flag"),
        (["DIR", "--client", "alice"], "engine.key is missing"),
        (["FILE/e"], "cannot be made"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert words in refused(capsys, *arguments)
    assert set(tree(tmp_path)) == {"FILE"}


def test_the_command_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanocore.keygen", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def read_as_documented(path: Path) -> dict[str, str]:
    """The keys of a file, by no more than PROTOCOL.md's section 14 says of its format."""
    lines = [line for line in path.read_text("ascii").splitlines() if not line.startswith("#")]
    section = lines[lines.index("curve") + 1 :]
    keys = {}
    for line in section:
        name, _, value = line.removeprefix("    ").partition(" = ")
        assert line.startswith("    ")
        assert value[0] == value[-1] == '"'
        keys[name] = value[1:-1]
    return keys


def test_another_language_reads_the_key_files_by_what_the_protocol_says_of_them(
    engine: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "laptop-keys"
    assert main([str(engine), "--client", "laptop", "--out", str(folder)]) == 0
    ours = ClientKeys.load(folder)
    server = read_as_documented(folder / "engine.key")
    own = read_as_documented(folder / "client.key_secret")
    assert server == {"public-key": ours.engine_public_key.decode()}
    assert own == {
        "public-key": ours.public_key.decode(),
        "secret-key": ours.secret_key.decode(),
    }
    assert all(len(key) == 40 for key in (*server.values(), *own.values()))
    listed = read_as_documented(engine / "clients" / "laptop.key")
    assert listed == read_as_documented(folder / "client.key")
    assert listed == {"public-key": own["public-key"]}
    assert read_as_documented(engine / "engine.key_secret").keys() == own.keys()
