"""The user's cache folder: its limit, and what other processes do to it meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nanocore.system.cache_folder import (
    LIMIT_NAME,
    CacheFolder,
    FileCache,
    cache_entries,
    cache_root,
    limit_bytes,
)

PURPOSE = "it is made at each start"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanocore"


def age(path: Path, seconds: float) -> None:
    used_s = time.time() - seconds
    os.utime(path, (used_s, used_s))


def names() -> list[tuple[str, str]]:
    return [(entry.kind, entry.path.name) for entry in cache_entries()]


def test_beyond_its_limit_what_was_used_longest_ago_is_deleted_whatever_its_kind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_NAME, "30")
    old, new = CacheFolder("old", PURPOSE), CacheFolder("new", PURPOSE)
    for number in range(3):
        old.write(f"{number}", bytes(10))
        age(root / "old" / f"{number}", 100 - number)
    assert old.read("0", 10) == bytes(10), "this one is used again"
    new.write("a", bytes(10))
    assert names() == [("old", "2"), ("old", "0"), ("new", "a")]
    new.write("b", bytes(30))
    assert names() == [("new", "b")]
    new.write("c", bytes(31))
    assert names() == [("new", "b")], "what exceeds the limit alone displaces nothing"
    monkeypatch.setenv(LIMIT_NAME, "20")
    new.write("d", bytes(30))
    assert names() == [], "the limit became less"


def test_a_limit_that_is_no_number_is_told_and_the_usual_one_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LIMIT_NAME, "2GB")
    assert limit_bytes() == 2 * 10**9
    assert "NANOCORE_CACHE_BYTES=2GB is no number of bytes" in caplog.text
    monkeypatch.setenv(LIMIT_NAME, "0")
    CacheFolder("kind", PURPOSE).write("a", b"x")
    assert names() == []


def test_what_a_killed_process_left_unfinished_is_deleted_an_hour_later(root: Path) -> None:
    cache = CacheFolder("kind", PURPOSE)
    cache.write("a", b"x")
    for name, seconds in ((".young", 3000.0), (".old", 4000.0)):
        (root / "kind" / name).write_bytes(b"x")
        age(root / "kind" / name, seconds)
    cache.write("b", b"x")
    assert {name for _, name in names()} == {".young", "a", "b"}


def test_two_writers_of_one_entry_leave_one_whole_entry(root: Path) -> None:
    one, other = CacheFolder("kind", PURPOSE), CacheFolder("kind", PURPOSE)
    one.write("a", b"content")
    other.write("a", b"content")
    assert names() == [("kind", "a")]
    assert one.read("a", 100) == b"content"


def test_an_entry_that_is_deleted_meanwhile_is_not_there_and_may_come_back(root: Path) -> None:
    cache = CacheFolder("kind", PURPOSE)
    cache.write("a", b"x")
    (entry,) = cache_entries()
    assert entry.delete()
    assert entry.delete(), "another process was faster"
    assert cache.read("a", 1) is None
    cache.write("a", b"x")
    assert cache.read("a", 1) == b"x"


def test_a_folder_that_cannot_be_used_is_told_once_and_takes_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "kind").mkdir(parents=True)
    (root / "kind").chmod(0o755)
    cache = CacheFolder("kind", PURPOSE)
    cache.write("a", b"x")
    assert cache.read("a", 1) is None
    assert [PURPOSE in record.message for record in caplog.records] == [True]
    assert cache_root() == root
    assert names() == []


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_or_a_dangling_link_in_the_folders_place_is_called_no_directory(
    root: Path, caplog: pytest.LogCaptureFixture, is_link: bool
) -> None:
    root.symlink_to("nowhere") if is_link else root.write_bytes(b"")
    CacheFolder("kind", PURPOSE).write("a", b"x")
    assert f"the cache folder {root / 'kind'}: {root} is not a directory: {PURPOSE}" in caplog.text


def test_symbolic_links_in_it_are_neither_listed_nor_followed_when_it_is_emptied(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_bytes(b"x")
    root.mkdir()
    (root / "kind").symlink_to(tmp_path / "mine")
    assert names() == []
    FileCache().write("0" * 64, b"x")
    assert (tmp_path / "mine" / "a").exists()


def test_a_pipe_in_an_entrys_place_is_no_entry_and_nobody_waits_for_its_writer(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheFolder("kind", PURPOSE)
    cache.write("a", b"x")
    (root / "kind" / "a").unlink()
    os.mkfifo(root / "kind" / "a")
    for _ in range(2):
        assert cache.read("a", 1) is None
    assert [record.message.endswith(PURPOSE) for record in caplog.records] == [True], "told once"
    cache.write("a", b"x")
    assert cache.read("a", 1) == b"x"
