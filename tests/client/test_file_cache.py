"""The cache of fetched files: private, keyed by content, trusted in nothing, and never needed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nanocore.client.connection.remote_files import FileCache

CONTENT = b"a tokenizer"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def _read(directory: Path) -> bytes | None:
    return FileCache(directory).read(DIGEST, len(CONTENT))


def test_what_was_written_is_read_by_others_until_it_is_deleted(tmp_path: Path) -> None:
    directory = tmp_path / "nanocore" / "files"
    cache = FileCache(directory)
    assert cache.read(DIGEST, len(CONTENT)) is None
    cache.write(DIGEST, CONTENT)
    assert _read(directory) == CONTENT
    assert [path.name for path in directory.iterdir()] == [DIGEST]
    (directory / DIGEST).unlink()
    assert cache.read(DIGEST, len(CONTENT)) is None


def test_it_lies_below_the_users_cache_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    FileCache().write(DIGEST, CONTENT)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    FileCache().write(DIGEST, CONTENT)
    for directory in (tmp_path / "xdg", tmp_path / "home" / ".cache"):
        assert (directory / "nanocore" / "files" / DIGEST).read_bytes() == CONTENT


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "nanocore" / "files"
    old_umask = os.umask(0)
    try:
        FileCache(directory).write(DIGEST, CONTENT)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / DIGEST).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"!", b"b tokenizer"])
def test_what_has_another_digest_is_not_there_and_can_be_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "files"
    FileCache(directory).write(DIGEST, CONTENT)
    (directory / DIGEST).write_bytes(content)
    assert _read(directory) is None
    assert "fetched again" in caplog.text
    FileCache(directory).write(DIGEST, CONTENT)
    assert _read(directory) == CONTENT


def test_an_unfinished_write_of_another_process_is_not_seen(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    (directory).mkdir(0o700)
    (directory / ".unfinished").write_bytes(CONTENT[:3])
    FileCache(directory).write(DIGEST, CONTENT)
    assert _read(directory) == CONTENT
    assert (directory / ".unfinished").read_bytes() == CONTENT[:3]


def _open_to_others(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)


def _symlink(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir(0o700)
    directory.symlink_to("elsewhere")


def _file_in_its_place(directory: Path) -> None:
    directory.write_bytes(b"")


@pytest.mark.parametrize("spoil", [_open_to_others, _symlink, _file_in_its_place])
def test_a_directory_that_is_not_the_users_own_is_not_used(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "files"
    spoil(directory)
    cache = FileCache(directory)
    cache.write(DIGEST, CONTENT)
    assert cache.read(DIGEST, len(CONTENT)) is None
    assert not list(tmp_path.rglob(DIGEST))
    assert len(caplog.records) == 1
    assert "files are fetched at each start" in caplog.text


def test_a_relative_cache_home_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    FileCache().write(DIGEST, CONTENT)
    assert not list(tmp_path.iterdir())
    assert "no absolute path" in caplog.text


def test_a_write_that_fails_is_logged_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    FileCache(tmp_path / "files").write(DIGEST, CONTENT)
    assert not list((tmp_path / "files").iterdir())
    assert "No space left on device" in caplog.text


def test_something_unreadable_in_an_entrys_place_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "files"
    (directory / DIGEST).mkdir(0o700, parents=True)
    directory.chmod(0o700)
    assert _read(directory) is None
    FileCache(directory).write(DIGEST, CONTENT)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
