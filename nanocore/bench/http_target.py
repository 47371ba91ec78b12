"""A server of OpenAI's API over HTTP: tokens come when the bytes of their events do.

A chunk is one arrival, however many tokens it brings, which it does not say. How many there were in
all the server's `usage` says, else the tokenizer, else the number of chunks; each chunk is taken to
have brought its share of them.
"""

from __future__ import annotations

import ssl
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from nanocore.bench.datasets import PromptSource
from nanocore.bench.engine_target import engine_client, engine_tokenizer
from nanocore.bench.opened import Opened, tokenizer_at, until_ready
from nanocore.bench.outcome import BenchRequest, Outcome
from nanocore.bench.serve_options import OPENAI_CHAT, Asked, Destination
from nanocore.bench.sse import DONE, EventReader, chunk_of, read_body, within_origin
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, shorten

CONNECT_TIMEOUT_S: Final = 30.0
_FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError)


class HttpTarget:
    """One endpoint.

    Args:
        session: with the headers of every request.
        url: of the endpoint. is_chat: prompts are a user's messages.
        fields: of every request's body.
        tokenizer: counts tokens for a server that does not; None if there is none.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        is_chat: bool,
        fields: Mapping[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._session, self._url, self._is_chat = session, url, is_chat
        self._fields, self._tokenizer = fields, tokenizer

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        """See `Target`."""
        body = msgspec.json.encode(self._body(request))
        headers = {"Content-Type": "application/json", "x-request-id": request_id}
        outcome = Outcome(request.num_prompt_tokens or 0, arrival_s, time.perf_counter())
        answer = _Answer(outcome)
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    text = (await read_body(response)).decode(errors="replace")
                    outcome.error = f"HTTP {response.status}: {shorten(' '.join(text.split()))}"
                    return outcome
                async for data in response.content.iter_any():
                    answer.feed(data, time.perf_counter())
        except (*_FAILURES, ConfigError) as error:
            outcome.error = f"{type(error).__name__}: {shorten(str(error))}"
            return outcome
        answer.end(self._tokenizer)
        return outcome

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        prompt = request.prompt.tolist() if isinstance(request.prompt, array) else request.prompt
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            body["max_completion_tokens"] = request.num_output_tokens
        else:
            body["prompt"] = prompt
            body["max_tokens"] = request.num_output_tokens
        return {**body, **self._fields}


class _Answer:
    """A stream of events, as it comes."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._reader = EventReader()
        self._parts: list[str] = []
        self._is_over = False
        self._num_output_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes have come.

        Raises:
            msgspec.MsgspecError: they are no events of a completion.
        """
        outcome = self._outcome
        for event in self._reader.feed(data):
            if event == DONE:
                self._is_over = True
                continue
            chunk = chunk_of(event)
            if chunk.error is not None:
                outcome.error = shorten(f"the stream ended with an error: {chunk.error}")
            if chunk.usage is not None:
                self._num_output_tokens = chunk.usage.completion_tokens
                if chunk.usage.prompt_tokens is not None:
                    outcome.num_prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                if choice.has_tokens:
                    outcome.add_tokens(1, now_s)
                    self._parts.append(choice.added_text)
                if choice.finish_reason is not None:
                    outcome.end_s, self._is_over = now_s, True

    def end(self, tokenizer: Tokenizer | None) -> None:
        """No more will come."""
        outcome = self._outcome
        outcome.text = "".join(self._parts)
        if not outcome.error and not outcome.chunk_times_s:
            outcome.error = "no token came"
        elif not outcome.error and not self._is_over:
            outcome.error = "the stream ended before the answer did"
        num_tokens = self._num_output_tokens
        if num_tokens is None and tokenizer is not None:
            num_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
        num_chunks = len(outcome.chunk_times_s)
        outcome.num_output_tokens = num_chunks if num_tokens is None else num_tokens
        outcome.chunk_tokens = shares(outcome.num_output_tokens, num_chunks)


def shares(total: int, num_parts: int) -> list[int]:
    """A number as the sum of so many, as even as can be; larger ones come first."""
    return [total // num_parts + (i < total % num_parts) for i in range(num_parts)]


@asynccontextmanager
async def open_server(
    destination: Destination, asked: Asked, ready_timeout_s: float
) -> AsyncIterator[Opened]:
    """A server that runs.

    Raises:
        ConfigError: URL, path or tokenizer cannot be. EngineDeadError: it does not name a model.
    """
    is_chat = destination.backend == OPENAI_CHAT
    if not destination.path.endswith("/chat/completions" if is_chat else "/completions") or (
        not is_chat and destination.path.endswith("/chat/completions")
    ):
        raise ConfigError(
            f"--endpoint {destination.path} is none of --backend {destination.backend}"
        )
    async with _session(destination) as session:
        model, root = destination.model, destination.model_id
        if model is None:
            model, root = await _first_model(session, destination.base_url, ready_timeout_s)
        with ExitStack() as closing:
            tokenizer, tokenizer_id = await _tokenizer(destination, root, closing)
            fields: dict[str, Any] = {"model": model}
            if asked.ignore_eos:
                fields["ignore_eos"] = True
            if asked.logprobs is not None:
                fields |= (
                    {"logprobs": True, "top_logprobs": asked.logprobs}
                    if is_chat
                    else {"logprobs": asked.logprobs}
                )
            fields |= {**asked.sampling, **asked.extra_body}
            url = f"{destination.base_url}{destination.path}"
            yield Opened(
                HttpTarget(session, url, is_chat, fields, tokenizer),
                PromptSource(
                    tokenizer,
                    takes_text=True,
                    takes_token_ids=not is_chat,
                    has_template=not is_chat,
                ),
                root or model,
                tokenizer_id,
            )


def _session(destination: Destination) -> aiohttp.ClientSession:
    """Without a limit of connections: how many are open is what is measured."""
    verified: ssl.SSLContext | bool = not destination.insecure
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=verified)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=destination.headers,
        trace_configs=[within_origin()],
    )


async def _first_model(
    session: aiohttp.ClientSession, base_url: str, patience_s: float
) -> tuple[str, str]:
    """Its name and its root."""
    found: list[tuple[str, str]] = []

    async def attempt() -> str:
        url = f"{base_url}/v1/models"
        try:
            async with session.get(url) as response:
                if response.status != 200:
                    return f"{url}: HTTP {response.status}"
                models = msgspec.json.decode(await read_body(response), type=_Models)
        except _FAILURES as error:
            return f"{url}: {type(error).__name__}: {error}"
        if not models.data:
            return f"{url} names no model: name one with --model"
        found.append((models.data[0].id, models.data[0].root or models.data[0].id))
        return ""

    await until_ready(attempt, patience_s)
    return found[0]


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def _tokenizer(
    destination: Destination, root: str | None, closing: ExitStack
) -> tuple[Tokenizer | None, str | None]:
    """The one that was named, else the engine's, else that of a model that is a folder here."""
    path = destination.tokenizer
    if path is None and destination.engine_endpoint is not None:
        async with engine_client(destination, 0) as client:
            tokenizer = await engine_tokenizer(client)
            if tokenizer is None:
                raise ConfigError(f"{destination.engine_endpoint}: its model has no tokenizer")
            closing.callback(tokenizer.close)
            return tokenizer, client.model_card.model
    if path is None and root is not None and (Path(root) / "tokenizer.json").is_file():
        path = root
    if path is None:
        return None, None
    return closing.enter_context(tokenizer_at(path)), path
