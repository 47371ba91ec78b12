"""Files of the model over the wire, and their cache: whole and right, or a typed error."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import ClientStateError, EngineDeadError, InvalidRequestError, ProtocolError
from nanocore.protocol.messages import (
    MAX_FILE_BYTES,
    MAX_FILE_CHUNK_BYTES,
    Control,
    Reply,
    Welcome,
)
from nanocore.system.cache_folder import FileCache
from tests.client.fake_engine import connected, file_entry, welcome_message

NAME = "tokenizer.json"
CONTENT = random.Random(1).randbytes(20 * MAX_FILE_CHUNK_BYTES + 5)
ENTRY = file_entry(NAME, CONTENT)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanocore" / "files"


def _num_cached(cache_folder: Path) -> int:
    return len(list(cache_folder.iterdir()))


@pytest.mark.parametrize("num_bytes", [0, 1, MAX_FILE_CHUNK_BYTES, MAX_FILE_CHUNK_BYTES + 1])
async def test_a_file_of_any_size_is_read(endpoint: str, num_bytes: int) -> None:
    content = CONTENT[:num_bytes]
    welcome = welcome_message(file_entry(NAME, content))

    async with connected(endpoint, welcome) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        num_chunks = -(-num_bytes // MAX_FILE_CHUNK_BYTES)
        await engine.serve_chunks(num_chunks, {NAME: content})
        assert await reading == content


async def test_a_few_chunks_are_under_way_and_may_come_in_any_order(endpoint: str) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        asked = [await engine.receive(Control) for _ in range(8)]
        marker = asyncio.create_task(client.stats())
        assert (await engine.receive(Control)).operation == "stats", "a ninth chunk"
        marker.cancel()
        for control in reversed(asked):
            end = control.offset + MAX_FILE_CHUNK_BYTES
            data = CONTENT[control.offset : end]
            engine.send(Reply(call_id=control.call_id, data=data))
        await engine.serve_chunks(21 - 8, {NAME: CONTENT})
        assert await reading == CONTENT


async def _read_by_another_client(endpoint: str, num_chunks: int) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        await engine.serve_chunks(num_chunks, {NAME: CONTENT})
        assert await reading == CONTENT


async def test_the_second_client_asks_for_nothing_unless_the_copy_is_damaged(
    endpoint: str, cache_folder: Path
) -> None:
    await _read_by_another_client(endpoint, 21)
    await _read_by_another_client(endpoint, 0)
    (cache_folder / ENTRY.sha256).write_bytes(CONTENT[:-1] + b"?")
    await _read_by_another_client(endpoint, 21)
    assert (cache_folder / ENTRY.sha256).read_bytes() == CONTENT


async def test_two_clients_that_fetch_at_once_do_not_disturb_each_other(
    endpoint: str, cache_folder: Path
) -> None:
    async with (
        connected(endpoint, welcome_message(ENTRY)) as (engine, client),
        connected(endpoint + "2", welcome_message(ENTRY)) as (engine_2, client_2),
    ):
        reading = [asyncio.create_task(c.read_file(NAME)) for c in (client, client_2)]
        serving = [e.serve_chunks(21, {NAME: CONTENT}) for e in (engine, engine_2)]
        await asyncio.gather(*serving)
        assert await asyncio.gather(*reading) == [CONTENT] * 2
    assert _num_cached(cache_folder) == 1


async def test_a_cache_that_cannot_be_used_stops_nobody(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nanocore").write_bytes(b"in the way")

    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        for _ in range(2):
            reading = asyncio.create_task(client.read_file(NAME))
            await engine.serve_chunks(21, {NAME: CONTENT})
            assert await reading == CONTENT
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["chat_template.jinja", "../../etc/passwd", "/etc/passwd", ""])
async def test_a_file_that_is_not_offered_is_refused_with_those_that_are(
    endpoint: str, name: str
) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (_, client):
        with pytest.raises(InvalidRequestError, match=r"it serves tokenizer\.json"):
            await client.read_file(name)
    async with connected(endpoint) as (_, client):
        with pytest.raises(InvalidRequestError, match="it serves none"):
            await client.read_file(name)


def _chunks_of(num_bytes: int) -> Welcome:
    welcome = welcome_message(ENTRY)
    return replace(welcome, limits=replace(welcome.limits, max_file_chunk_bytes=num_bytes))


@pytest.mark.parametrize(
    ("welcome", "message"),
    [
        (welcome_message(replace(ENTRY, num_bytes=MAX_FILE_BYTES + 1)), "67108865 bytes: at most"),
        (welcome_message(replace(ENTRY, num_bytes=-1)), "-1 bytes"),
        (welcome_message(replace(ENTRY, sha256="../../escape")), "digest '../../escape'"),
        (welcome_message(replace(ENTRY, sha256=ENTRY.sha256.upper())), "lower-case"),
        (welcome_message(replace(ENTRY, sha256=ENTRY.sha256 + "\n")), "64 lower-case"),
        (_chunks_of(0), "chunks of 0 bytes"),
        (_chunks_of(1), "chunks of 1 bytes"),
        (_chunks_of(-1), "chunks of -1 bytes"),
    ],
)
async def test_an_offer_that_cannot_be_right_is_refused_before_anything_is_asked(
    endpoint: str, tmp_path: Path, welcome: Welcome, message: str
) -> None:
    async with connected(endpoint, welcome) as (_, client):
        with pytest.raises(ProtocolError, match=message):
            await client.read_file(NAME)
    assert not list(tmp_path.rglob("escape"))


async def test_a_name_of_a_later_version_is_a_name_and_no_path(
    endpoint: str, tmp_path: Path
) -> None:
    name = f"..{tmp_path}/new.json"
    welcome = welcome_message(file_entry(name, b"x"))

    async with connected(endpoint, welcome) as (engine, client):
        with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
            await client.get_tokenizer()
        reading = asyncio.create_task(client.read_file(name))
        await engine.serve_chunks(1, {name: b"x"})
        assert await reading == b"x"
    assert not any(tmp_path.rglob("new.json"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "sent 0 bytes instead of 65536"),
        ({"data": b""}, "sent 0 bytes instead of 65536"),
        ({"data": b"x"}, "sent 1 bytes instead of 65536"),
        ({"data": bytes(MAX_FILE_CHUNK_BYTES + 1)}, "sent 65537 bytes instead of 65536"),
        ({"data": bytes(2**23)}, "sent 8388608 bytes"),
        ({"ok": False, "message": "not now"}, "refuses it: not now"),
    ],
)
async def test_a_chunk_that_cannot_be_right_ends_the_fetch(
    endpoint: str, cache_folder: Path, answer: dict[str, Any], message: str
) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        control = await engine.receive(Control)
        engine.send(Reply(call_id=control.call_id, **answer))
        await engine.flush()
        with pytest.raises(ProtocolError, match=message):
            await reading
    assert _num_cached(cache_folder) == 0


async def test_content_of_another_digest_is_an_error_and_not_kept(
    endpoint: str, cache_folder: Path
) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        await engine.serve_chunks(21, {NAME: CONTENT[:-1] + b"?"})
        with pytest.raises(ProtocolError, match="had promised"):
            await reading
    assert _num_cached(cache_folder) == 0


async def test_an_engine_that_never_answers_is_taken_for_dead(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.remote_files.CHUNK_TIMEOUT_S", 0.05)

    async with connected(endpoint, welcome_message(ENTRY)) as (_, client):
        with pytest.raises(EngineDeadError, match=r"tokenizer\.json within 0\.05 s"):
            await client.read_file(NAME)


async def test_closing_ends_the_fetch(endpoint: str) -> None:
    async with connected(endpoint, welcome_message(ENTRY)) as (engine, client):
        reading = asyncio.create_task(client.read_file(NAME))
        await engine.serve_chunks(3, {NAME: CONTENT})
        await client.close()
        with pytest.raises(ClientStateError):
            await reading


CACHED = b"a tokenizer"
DIGEST = hashlib.sha256(CACHED).hexdigest()


def _read(directory: Path) -> bytes | None:
    return FileCache(directory).read(DIGEST, len(CACHED))


def test_what_was_written_is_read_by_others_until_it_is_deleted(tmp_path: Path) -> None:
    directory = tmp_path / "nanocore" / "files"
    cache = FileCache(directory)
    assert cache.read(DIGEST, len(CACHED)) is None
    cache.write(DIGEST, CACHED)
    assert _read(directory) == CACHED
    assert [path.name for path in directory.iterdir()] == [DIGEST]
    (directory / DIGEST).unlink()
    assert cache.read(DIGEST, len(CACHED)) is None


def test_it_lies_below_the_users_cache_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    FileCache().write(DIGEST, CACHED)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    FileCache().write(DIGEST, CACHED)
    for directory in (tmp_path / "xdg", tmp_path / "home" / ".cache"):
        assert (directory / "nanocore" / "files" / DIGEST).read_bytes() == CACHED


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "nanocore" / "files"
    old_umask = os.umask(0)
    try:
        FileCache(directory).write(DIGEST, CACHED)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / DIGEST).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", CACHED[:-1], CACHED + b"!", b"b tokenizer"])
def test_what_has_another_digest_is_not_there_and_can_be_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "files"
    FileCache(directory).write(DIGEST, CACHED)
    (directory / DIGEST).write_bytes(content)
    assert _read(directory) is None
    assert "fetched again" in caplog.text
    FileCache(directory).write(DIGEST, CACHED)
    assert _read(directory) == CACHED


def test_an_unfinished_write_of_another_process_is_not_seen(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    (directory).mkdir(0o700)
    (directory / ".unfinished").write_bytes(CACHED[:3])
    FileCache(directory).write(DIGEST, CACHED)
    assert _read(directory) == CACHED
    assert (directory / ".unfinished").read_bytes() == CACHED[:3]


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
    cache.write(DIGEST, CACHED)
    assert cache.read(DIGEST, len(CACHED)) is None
    assert not list(tmp_path.rglob(DIGEST))
    assert len(caplog.records) == 1
    assert "files are fetched at each start" in caplog.text


def test_a_relative_cache_home_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    FileCache().write(DIGEST, CACHED)
    assert not list(tmp_path.iterdir())
    assert "no absolute path" in caplog.text


def test_a_write_that_fails_is_logged_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    FileCache(tmp_path / "files").write(DIGEST, CACHED)
    assert not list((tmp_path / "files").iterdir())
    assert "No space left on device" in caplog.text


def test_something_unreadable_in_an_entrys_place_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "files"
    (directory / DIGEST).mkdir(0o700, parents=True)
    directory.chmod(0o700)
    assert _read(directory) is None
    FileCache(directory).write(DIGEST, CACHED)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
