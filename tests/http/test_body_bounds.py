"""Bodies of very many items: refused before they are decoded, whatever their texts look like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from nanocore.http.app import App
from nanocore.http.body_bounds import MAX_COMMAS, MAX_ITEMS, check_bounds
from nanocore.http.errors import HttpError
from nanocore.http.settings import AppSettings
from tests.client.running import run
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
    assert b"are taken; send several requests" in http.body


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
    check_bounds(body_of({"metadata": value}))


def test_what_counts_is_said() -> None:
    with pytest.raises(HttpError, match=f"has {MAX_ITEMS + 2} lists and objects: at most"):
        check_bounds(body_of({"messages": [{}] * MAX_ITEMS}))
