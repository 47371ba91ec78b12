"""The application without a server: requests go to it as calls, in the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import openai

from nanocore.client import AsyncEngineClient
from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from tests.client.running import run

BASE_URL = "http://test"


@asynccontextmanager
async def app_of(endpoint: str, **settings: Any) -> AsyncIterator[tuple[App, httpx.AsyncClient]]:
    """The application of the engine at this endpoint, and what sends it requests.

    A streamed answer comes when it is whole.
    """
    app = App(AppSettings(**settings))
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        app.state.client = client
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as http:
            yield app, http


def ask(endpoint: str, path: str, body: Any = None, **settings: Any) -> httpx.Response:
    """The reply to one request; GET without a body."""

    async def send() -> httpx.Response:
        async with app_of(endpoint, **settings) as (_, http):
            return await (http.get(path) if body is None else http.post(path, json=body))

    return run(send())


def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """OpenAI's own client, which sends its requests that way."""
    return openai.AsyncOpenAI(
        api_key="none", base_url=f"{BASE_URL}/v1", http_client=http, max_retries=0
    )
