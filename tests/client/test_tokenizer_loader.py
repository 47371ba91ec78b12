"""The tokenizer of a client: from the engine or a folder, once, and only when it is needed."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanocore.client import (
    AsyncEngineClient,
    ClientStateError,
    InvalidRequestError,
    ProtocolError,
    collect,
)
from nanocore.client.connection.tokenizer_loader import (
    NUM_THREADS,
    TokenizerLoader,
    TokenizerPreload,
)
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.errors import StartFile
from nanocore.protocol.messages import Abort, Control, Event, Reply, Submit
from nanocore.system.cache_folder import FileCache, cache_entries
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected, file_entry, welcome_message
from tests.client.running import PATIENCE_S, run
from tests.protocol.samples import MODEL_CARD

NUM_FILES = 2  # of the byte tokenizer, each of one chunk


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def contents(tokenizer_folder: Path) -> dict[str, bytes]:
    """The byte tokenizer's files, and one that tokenizing does not need."""
    files = {path.name: path.read_bytes() for path in tokenizer_folder.iterdir()}
    return {**files, "generation_config.json": b"{}"}


def _serving(endpoint: str, contents: dict[str, bytes], **options: Any) -> Any:
    welcome = welcome_message(*(file_entry(name, data) for name, data in contents.items()))
    return connected(endpoint, welcome, **options)


async def test_a_chat_needs_nothing_but_the_endpoint(
    endpoint: str, contents: dict[str, bytes], tokenizer: Any
) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        answer = client.chat([{"role": "user", "content": "é"}])
        reading = asyncio.create_task(collect(answer))
        await engine.serve_chunks(NUM_FILES, contents)
        submit = await engine.accept()
        engine.output({1: tokenizer.encode("中")}, Event(handle=1, finish_reason="length"))
        prompt = tokenizer.encode("user: é\nassistant: ")
        assert unpack_int32(submit.prompt_token_ids).tolist() == prompt
        assert [one.content for one in await reading] == ["中"]


def test_special_tokens_come_from_an_engine_that_serves_their_file_and_else_are_not_missed(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    """The file is new in protocol 1.4."""
    contents["chat_template.jinja"] = b"{{ bos_token }}{{ messages[0].content }}"
    messages: Any = [{"role": "user", "content": "a"}]

    async def render() -> str:
        async with _serving(endpoint, contents) as (engine, client):
            loading = asyncio.create_task(client.get_tokenizer())
            await engine.serve_chunks(len(contents) - 1, contents)  # but generation_config.json
            text: str = (await loading).render_chat(messages)
            return text

    assert run(render()) == "a"
    contents["special_tokens_map.json"] = b'{"bos_token": {"content": "<filler300>"}}'
    contents["tokenizer_config.json"] += b" "  # not in the cache
    contents["tokenizer.json"] += b" "
    contents["chat_template.jinja"] += b"{# #}"
    assert run(render()) == "<filler300>a"


async def test_a_hundred_requests_at_once_load_it_once_and_keep_their_order(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        requests = [
            asyncio.create_task(client.complete("a", request_id=str(i))) for i in range(100)
        ]
        await engine.serve_chunks(NUM_FILES, contents)
        for i in range(100):
            assert (await engine.accept(i)).request_id == str(i)
            engine.finish(i)
            await requests[i]  # the engine's high-water mark is less than all the answers
        assert await client.get_tokenizer() is await client.get_tokenizer()


async def test_token_ids_without_text_need_none(endpoint: str, contents: dict[str, bytes]) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        request = await engine.begin(client.complete([1], NO_TEXT))
        engine.finish()
        await request


async def test_a_folder_that_is_named_wins(
    endpoint: str, tokenizer_folder: Path, contents: dict[str, bytes]
) -> None:
    damaged = {**contents, "tokenizer.json": b"{}"}

    async with _serving(endpoint, damaged, tokenizer=tokenizer_folder) as (_, client):
        tokenizer = await client.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("é")) == "é"


@pytest.mark.parametrize(("num_missing", "is_told"), [(0, False), (1, True)])
async def test_a_folder_with_more_tokens_than_the_model_is_told(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, num_missing: int, is_told: bool
) -> None:
    size = Tokenizer.from_folder(tokenizer_folder).backend.get_vocab_size()
    card = msgspec.structs.replace(MODEL_CARD, vocab_size=size - num_missing)
    no_files: Any = None
    loader = TokenizerLoader(tokenizer_folder, no_files, card)
    await loader.get()
    await loader.close()
    message = f"{size} tokens, and {card.model} {size - 1}: is it of another model?"
    assert (message in caplog.text) == is_told


async def test_the_vocabulary_of_a_model_with_a_tokenizer_is_not_fetched(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    contents = {**contents, "vocab.json": b"x", "merges.txt": b"x", "tokenizer.model": b"x"}

    async with _serving(endpoint, contents) as (engine, client):
        loading = asyncio.create_task(client.get_tokenizer())
        await engine.serve_chunks(NUM_FILES, contents)
        assert (await loading).encode("a")


async def test_an_engine_without_a_tokenizer_is_refused_with_the_remedy(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    del contents["tokenizer.json"]

    async with _serving(endpoint, contents) as (engine, client):
        request = asyncio.create_task(client.complete("text"))
        await engine.serve_chunks(NUM_FILES - 1, contents)
        with pytest.raises(InvalidRequestError, match="tokenizer=FOLDER"):
            await request


async def test_a_failure_is_everyones_and_the_next_one_tries_again(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        requests = [asyncio.create_task(client.complete("a")) for _ in range(3)]
        control = await engine.receive(Control)
        engine.send(Reply(call_id=control.call_id, ok=False, message="not now"))
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(error) for error in errors] == [ProtocolError] * 3
        loading = asyncio.create_task(client.get_tokenizer())
        await engine.serve_chunks(NUM_FILES, contents)
        assert (await loading).encode("a")


async def test_whoever_stops_waiting_leaves_the_others_theirs(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        first, second = (asyncio.create_task(client.get_tokenizer()) for _ in range(2))
        control = await engine.receive(Control)
        first.cancel()
        data = contents[control.file or ""]
        engine.send(Reply(call_id=control.call_id, data=data))
        await engine.serve_chunks(NUM_FILES - 1, contents)
        assert (await second).encode("a")
        assert first.cancelled()


async def test_closing_ends_the_loading(endpoint: str, contents: dict[str, bytes]) -> None:
    async with _serving(endpoint, contents) as (engine, client):
        loading = asyncio.create_task(client.get_tokenizer())
        await engine.receive(Control)
        await client.close()
        with pytest.raises(ClientStateError):
            await loading
        with pytest.raises(ClientStateError):
            await client.get_tokenizer()


async def test_a_long_text_holds_up_nobody_while_it_is_tokenized(
    endpoint: str, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * (MAX_QUICK_CHARS + 1)
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def recording(self: Tokenizer, text: str, *args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, text, *args)

    async with _serving(endpoint, contents) as (engine, client):
        loading = asyncio.create_task(client.get_tokenizer())
        await engine.serve_chunks(NUM_FILES, contents)
        tokenizer = await loading
        monkeypatch.setattr(Tokenizer, "encode", recording)
        for prompt in (text, text[:-1]):
            request = asyncio.create_task(client.complete(prompt))
            submit = await engine.receive(Submit)
            assert unpack_int32(submit.prompt_token_ids).tolist() == encode(tokenizer, prompt)
            request.cancel()
            await engine.receive(Abort)
        assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_short_work_does_not_wait_for_long_work(
    tokenizer_folder: Path, endpoint: str
) -> None:
    is_begun, may_end = threading.Semaphore(0), threading.Event()

    def work_at_length(_: Tokenizer) -> None:
        is_begun.release()
        may_end.wait(PATIENCE_S)

    async with connected(endpoint, tokenizer=tokenizer_folder) as (_, client):
        loop = asyncio.get_running_loop()
        long = [loop.create_task(client.with_tokenizer(work_at_length, True)) for _ in "abcd"]
        for _ in range(NUM_THREADS):
            await asyncio.to_thread(is_begun.acquire)
        text = "a" * (MAX_QUICK_CHARS + 1)
        assert await client.encode(text) == (await client.get_tokenizer()).encode(text)
        may_end.set()
        await asyncio.gather(*long)


async def test_work_that_nobody_waits_for_any_more_is_not_begun(
    tokenizer_folder: Path, endpoint: str
) -> None:
    may_end = threading.Event()
    begun: list[str] = []

    def work(name: str, _: Tokenizer) -> None:
        begun.append(name)
        may_end.wait(PATIENCE_S)

    async with connected(endpoint, tokenizer=tokenizer_folder) as (_, client):
        names = [*map(str, range(NUM_THREADS)), "left", "last"]
        loop = asyncio.get_running_loop()
        works = [loop.create_task(client.with_tokenizer(partial(work, n), True)) for n in names]
        while len(begun) < NUM_THREADS:
            await asyncio.sleep(0)
        works[-2].cancel()
        await asyncio.gather(works[-2], return_exceptions=True)
        may_end.set()
        await works[-1]
        assert "left" not in begun


def _offered(contents: dict[str, bytes]) -> list[StartFile]:
    """Put contents into the cache folder, as an engine that starts does."""
    files = []
    for name, content in contents.items():
        sha256 = hashlib.sha256(content).hexdigest()
        FileCache().write(sha256, content)
        files.append(StartFile(name, len(content), sha256))
    return files


def _digests(files: list[StartFile]) -> dict[str, str]:
    return {file.name: file.sha256 for file in files}


async def test_a_tokenizer_is_made_of_cached_files_while_its_engine_starts(
    contents: dict[str, bytes], tokenizer: Any
) -> None:
    files, preload = _offered(contents), TokenizerPreload()
    preload.begin(files)
    made = await preload.take(_digests(files))
    assert made is not None
    assert made.encode("é中") == tokenizer.encode("é中")
    assert await preload.take(_digests(files)) is None, "it is one session's"


async def test_an_engine_that_offers_other_files_than_it_announced_is_asked_for_them(
    contents: dict[str, bytes],
) -> None:
    files, preload = _offered(contents), TokenizerPreload()
    preload.begin(files)
    assert await preload.take(_digests(files) | {"tokenizer.json": "0" * 64}) is None


@pytest.mark.parametrize("is_there", [False, True])
async def test_what_the_cache_has_not_or_has_damaged_is_asked_of_the_engine(
    contents: dict[str, bytes], is_there: bool
) -> None:
    files, preload = _offered(contents), TokenizerPreload()
    for entry in cache_entries():
        entry.path.write_bytes(b"damaged") if is_there else entry.path.unlink()
    preload.begin(files)
    assert await preload.take(_digests(files)) is None


async def test_a_tokenizer_that_cannot_be_made_is_no_reason_not_to_start(
    contents: dict[str, bytes],
) -> None:
    files, preload = _offered(contents | {"tokenizer.json": b"{}"}), TokenizerPreload()
    preload.begin(files)
    assert await preload.take(_digests(files)) is None


async def test_a_session_uses_the_tokenizer_that_was_made_for_its_engine(
    endpoint: str, contents: dict[str, bytes]
) -> None:
    engine = FakeEngine(endpoint)
    welcome = welcome_message(*(file_entry(name, data) for name, data in contents.items()))
    client = AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S, resume=False)
    client.tokenizer_preload = TokenizerPreload()
    client.tokenizer_preload.begin(_offered(contents))
    try:
        welcoming = asyncio.create_task(engine.welcome(welcome))
        async with client:
            await welcoming
            # The engine answers no read_file.
            assert (await client.get_tokenizer()).encode("a")
    finally:
        engine.close()
