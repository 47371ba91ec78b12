"""Requests that come while there is no engine: they wait for the next one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.messages import Event, Submit
from tests.client.fake_engine import FakeEngine, until_lost
from tests.client.test_resuming import _connected, _next, _welcome
from tests.http.asgi import Connection, scope

TURNS = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/messages": {"max_tokens": 4, "messages": TURNS},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}
WITHOUT_ENGINE = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_waits_for_the_next_engine(
    endpoint: str, tokenizer_folder: Path, path: str
) -> None:
    async def answer(engine: FakeEngine) -> None:
        submit = await engine.accept()
        assert isinstance(submit, Submit)
        is_embedding = submit.sampling.pooling is not None
        embedding = bytes(8) if is_embedding else None
        engine.output({}, Event(handle=1, finish_reason="stop", embedding=embedding))

    async with _connected(endpoint, tokenizer=tokenizer_folder) as (old, client):
        old.close()
        await until_lost(client)
        app = App(AppSettings())
        app.state.client = client
        http = Connection(json.dumps(BODIES[path]).encode())
        asking = app(scope(path=path, host="localhost"), http.receive, http.send)
        request = asyncio.ensure_future(asking)
        async with _next(endpoint, _welcome(1)) as new:
            if path not in WITHOUT_ENGINE:
                await answer(new)
            await request
        assert http.status == 200
