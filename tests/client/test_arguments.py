"""What callers give by mistake: a typed error of their own call, and no harm to anybody else."""

from __future__ import annotations

import asyncio
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nanocore.client import (
    AsyncEngineClient,
    ConfigError,
    InvalidRequestError,
    KeyFileError,
    SamplingParams,
)
from nanocore.protocol.sampling import EngineSamplingParams
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected, welcome_message
from tests.client.running import run
from tests.protocol.keys import make_key_folders


async def _refused_at_once(
    engine: FakeEngine, client: AsyncEngineClient, *args: Any, **options: Any
) -> None:
    """Assert that a request is refused before anything is sent, in each of the three ways."""
    for call in (client.complete(*args, **options), anext(client.generate(*args, **options))):
        with pytest.raises(InvalidRequestError):
            await call
    await _next_message_is_a_request(engine, client)


async def _next_message_is_a_request(engine: FakeEngine, client: AsyncEngineClient) -> None:
    request = asyncio.create_task(client.complete([1], NO_TEXT, request_id="next"))
    assert (await engine.accept(1)).request_id == "next"
    engine.finish(1)
    assert (await request).finished


@pytest.mark.parametrize(
    "request_id", ["", "x" * 257, 0, 5, b"r", ["r"], "\ud800"], ids=lambda value: repr(value)[:9]
)
async def test_what_is_no_request_id_is_refused_at_once(endpoint: str, request_id: Any) -> None:
    async with connected(endpoint) as (engine, client):
        await _refused_at_once(engine, client, [1], NO_TEXT, request_id=request_id)
        with pytest.raises(InvalidRequestError):
            await client.abort(request_id)
        await _next_message_is_a_request(engine, client)


async def test_nobody_is_aborted_by_the_name_of_none(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        with pytest.raises(InvalidRequestError, match="a str, not NoneType"):
            await client.abort(None)  # type: ignore[arg-type]
        await _next_message_is_a_request(engine, client)


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 1}, "greedy", 1, [NO_TEXT], SamplingParams, EngineSamplingParams()],
    ids=lambda value: type(value).__name__,
)
async def test_what_are_no_sampling_params_is_refused_at_once(endpoint: str, params: Any) -> None:
    async with connected(endpoint) as (engine, client):
        await _refused_at_once(engine, client, [1], params)


@pytest.mark.parametrize(
    "prompt",
    [None, 7, 1.5, b"bytes", (1, 2), {1, 2}, np.array([1, 2]), np.int64(1), [None], [[1]], ["a"],
     [1.5], array("d", [1.5]), array("q", [2**31]), [2**31], {"prompt_token_ids": (1, 2)}, {},
     {"prompt": "text"}, {"prompt_token_ids": None}, {"prompt_token_ids": "12"}],
    ids=repr,
)  # fmt: skip
async def test_what_is_no_prompt_is_refused_at_once(endpoint: str, prompt: Any) -> None:
    async with connected(endpoint) as (engine, client):
        await _refused_at_once(engine, client, prompt, NO_TEXT)
        await _refused_at_once(engine, client, prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": Ellipsis},
        {"priority": 2**64},
        {"cache_salt": Ellipsis},
        {"cache_salt": "\ud800"},
        {"sampling_params": SamplingParams(stop_token_ids=[2**64], detokenize=False)},
    ],
    ids=ascii,
)
async def test_what_cannot_be_sent_is_refused_at_once(
    endpoint: str, options: dict[str, Any]
) -> None:
    async with connected(endpoint) as (engine, client):
        await _refused_at_once(engine, client, [1], **{"sampling_params": NO_TEXT} | options)


async def test_a_request_above_the_frames_limit_is_refused_at_once_and_no_session_is_cut(
    endpoint: str,
) -> None:
    welcome = welcome_message()
    welcome = replace(welcome, limits=replace(welcome.limits, max_frame_bytes=10_000))

    async with connected(endpoint, welcome) as (engine, client):
        with pytest.raises(InvalidRequestError, match=r"has 1\d{4} bytes.* at most 10000"):
            await client.complete([1] * 2_600, NO_TEXT)
        await _refused_at_once(engine, client, [1] * 2_600, NO_TEXT)


@pytest.mark.parametrize("name", [None, 5, ["tokenizer.json"], b"tokenizer.json", "/etc/passwd"])
async def test_what_is_no_files_name_is_refused_at_once(endpoint: str, name: Any) -> None:
    async with connected(endpoint) as (engine, client):
        with pytest.raises(InvalidRequestError):
            await client.read_file(name)
        await _next_message_is_a_request(engine, client)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"endpoint": 5}, "endpoint=5"),
        ({"endpoint": Path("/x/engine.sock")}, "endpoint="),
        ({"endpoint": b"ipc:///x"}, "endpoint="),
        ({"endpoint": "ipc:///x", "timeout_s": 0}, "timeout_s=0"),
        ({"endpoint": "ipc:///x", "timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"endpoint": "ipc:///x", "timeout_s": "10"}, "timeout_s='10'"),
        ({"endpoint": "ipc:///x", "timeout_s": None}, "timeout_s=None"),
        ({"endpoint": "ipc:///x", "timeout_s": True}, "timeout_s=True"),
        ({"endpoint": "ipc:///x", "tokenizer": 5}, "tokenizer=5"),
        ({"endpoint": "tcp://127.0.0.1:1", "curve_dir": 5}, "curve_dir=5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_of_connect_are_named_at_once(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        AsyncEngineClient.connect(**options)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "ipc://", "tcp://x", "ipc:///x\0y"])
def test_an_endpoint_that_is_none_is_refused_at_once_or_on_entering(endpoint: str) -> None:
    async def scenario() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=1000):
            raise AssertionError("there is nobody")

    with pytest.raises(ConfigError):
        run(scenario())


TCP = "tcp://127.0.0.1:5555"


def test_keys_are_for_tcp_alone_which_needs_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs curve_dir.*nanocore-keygen DIR --client"):
        AsyncEngineClient.connect(TCP)

    with pytest.raises(KeyFileError, match=f"{tmp_path}/none does not exist"):
        AsyncEngineClient.connect(TCP, curve_dir=tmp_path / "none")
    with pytest.raises(KeyFileError, match=r"client\.key_secret is missing"):
        AsyncEngineClient.connect(TCP, curve_dir=tmp_path)

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
