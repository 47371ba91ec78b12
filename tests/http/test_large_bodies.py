"""Large bodies: refused before they are decoded, and their memory returned to the system."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from nanocore.http import state
from nanocore.http.app import App
from nanocore.http.exchange import MAX_COMMAS, MAX_ITEMS, check_body_limits
from nanocore.http.http_errors import HttpError
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import LARGE_BYTES
from tests.client.running import in_event_loop, run
from tests.http.asgi import Connection, scope
from tests.http.hostile_bodies import GOOD

CHAT = "/v1/chat/completions"
TOO_MANY = {
    "strings": ["a"] * (MAX_ITEMS + 1),
    "strings with escapes": ['\\"'] * (MAX_ITEMS + 1),
    "keys": {str(i): 1 for i in range(MAX_ITEMS + 1)},
    "lists": [[]] * MAX_ITEMS,
    "objects": [{}] * MAX_ITEMS,
    "lists after texts": ["\\[", *[[1]] * MAX_ITEMS],
    "numbers": [1] * (MAX_COMMAS + 2),
}


def body_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "what"),
    [*((path, "lists") for path in GOOD), *((CHAT, what) for what in TOO_MANY)],
)
def test_bodies_of_too_many_items_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, path: str, what: str
) -> None:
    def decode(body: bytes) -> None:
        raise AssertionError("the body is decoded")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    http = Connection(body_of({"metadata": TOO_MANY[what]}))
    app = App(AppSettings())
    run(app(scope(path=path, host="localhost"), http.receive, http.send))
    assert http.status == 413
    assert b"are read; send several requests" in http.body


@pytest.mark.parametrize(
    "value",
    [
        ["a"] * (MAX_ITEMS - 4),
        [[1]] * (MAX_ITEMS - 4),
        [1] * MAX_COMMAS,
        '"' * (3 * MAX_ITEMS),
        "[{" * MAX_ITEMS,
        ", " * (MAX_COMMAS + 4),
        ["\\" * 5, "[" * (MAX_ITEMS + 1), '\\"', "," * (MAX_COMMAS + 4), '"\\'],
    ],
)
def test_what_texts_hold_does_not_count(value: Any) -> None:
    check_body_limits(body_of({"metadata": value}))


def test_what_counts_is_said() -> None:
    with pytest.raises(HttpError, match=f"has {MAX_ITEMS + 2} lists and objects: at most"):
        check_body_limits(body_of({"messages": [{}] * MAX_ITEMS}))


@pytest.mark.parametrize("size", [LARGE_BYTES, AppSettings().max_body_bytes + 1])
@in_event_loop
async def test_memory_is_given_back_once_after_large_bodies(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    loop, is_trimmed = asyncio.get_running_loop(), asyncio.Event()
    trims: list[int] = []

    def trim(padding: int) -> int:
        trims.append(padding)
        loop.call_soon_threadsafe(is_trimmed.set)
        return 1

    monkeypatch.setattr(state, "trim", trim)
    monkeypatch.setattr(state, "TRIM_DELAY_S", 0.0)
    app = App(AppSettings())

    async def send(num_bytes: int) -> None:
        http = Connection(b" " * num_bytes)
        await app(scope(path="/tokenize", host="localhost"), http.receive, http.send)
        assert http.status in (400, 413)

    await send(LARGE_BYTES - 1)
    assert not app.state.memory._is_due
    for _ in range(3):
        await send(size)
    await is_trimmed.wait()
    assert trims == [0]


def test_the_c_library_is_asked() -> None:
    assert state.trim(0) in (0, 1)
