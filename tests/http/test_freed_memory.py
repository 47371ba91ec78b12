"""What large bodies took goes back to the system."""

from __future__ import annotations

import asyncio

import pytest

from nanocore.http import freed_memory
from nanocore.http.app import App
from nanocore.http.freed_memory import LARGE_BYTES
from nanocore.http.settings import AppSettings
from tests.client.running import run
from tests.http.asgi import Connection, scope


@pytest.mark.parametrize("size", [LARGE_BYTES, AppSettings().max_body_bytes + 1])
def test_memory_is_given_back_once_after_large_bodies(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async def scenario() -> None:
        loop, is_trimmed = asyncio.get_running_loop(), asyncio.Event()
        trims: list[int] = []

        def trim(padding: int) -> int:
            trims.append(padding)
            loop.call_soon_threadsafe(is_trimmed.set)
            return 1

        monkeypatch.setattr(freed_memory, "trim", trim)
        monkeypatch.setattr(freed_memory, "DELAY_S", 0.0)
        app = App(AppSettings())

        async def send(num_bytes: int) -> None:
            http = Connection(b" " * num_bytes)
            await app(scope(path="/tokenize", host="localhost"), http.receive, http.send)
            assert http.status in (400, 413)

        await send(LARGE_BYTES - 1)
        assert not app.state.freed_memory._is_due
        for _ in range(3):
            await send(size)
        await is_trimmed.wait()
        assert trims == [0]

    run(scenario())


def test_the_c_library_is_asked() -> None:
    assert freed_memory.trim(0) in (0, 1)
