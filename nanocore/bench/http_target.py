"""HttpTarget: a server of OpenAI's API, measured when the bytes of its events arrive.

A chunk is one arrival with an unknown number of tokens. Their total comes from the server's
`usage`, else from the tokenizer, else it is the number of chunks. It is spread evenly over the
chunks.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from nanocore.bench.datasets import PromptSource
from nanocore.bench.load import BenchRequest, Outcome
from nanocore.bench.sse import DONE, EventReader, chunk_of, read_body, within_origin
from nanocore.bench.targets import (
    OPENAI_CHAT,
    Destination,
    DraftCounts,
    OpenTarget,
    RequestFields,
    engine_tokenizer,
    join_engine,
    tokenizer_at,
    until_ready,
)
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, InvalidRequestError, shorten

CONNECT_TIMEOUT_S: Final = 30.0
_FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """session: with the headers of every request. is_chat: prompts are user messages.
    fields: of every request's body. tokenizer: counts tokens if the server does not.
    """

    session: aiohttp.ClientSession
    url: str
    is_chat: bool
    fields: Mapping[str, Any]
    tokenizer: Tokenizer | None

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        body = msgspec.json.encode(self._body(request))
        headers = {"Content-Type": "application/json", "x-request-id": request_id}
        outcome = Outcome(request.num_prompt_tokens or 0, arrival_s, time.perf_counter())
        stream = _ResponseStream(outcome)
        try:
            async with self.session.post(self.url, data=body, headers=headers) as response:
                if response.status != 200:
                    text = (await read_body(response)).decode(errors="replace")
                    outcome.error = f"HTTP {response.status}: {shorten(' '.join(text.split()))}"
                    return outcome
                async for data in response.content.iter_any():
                    stream.feed(data, time.perf_counter())
        except (*_FAILURES, ConfigError) as error:
            outcome.error = f"{type(error).__name__}: {shorten(str(error))}"
            return outcome
        stream.end(self.tokenizer)
        return outcome

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        prompt = request.prompt.tolist() if isinstance(request.prompt, array) else request.prompt
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            body["max_completion_tokens"] = request.num_output_tokens
        else:
            body["prompt"] = prompt
            body["max_tokens"] = request.num_output_tokens
        return {**body, **self.fields}


class _ResponseStream:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._reader = EventReader()
        self._parts: list[str] = []
        self._is_done = False
        self._num_output_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        outcome = self._outcome
        for event in self._reader.feed(data):
            if event == DONE:
                self._is_done = True
                continue
            chunk = chunk_of(event)
            if chunk.error is not None:
                outcome.error = shorten(f"the server reported an error: {chunk.error}")
            if chunk.usage is not None:
                self._num_output_tokens = chunk.usage.completion_tokens
                if chunk.usage.prompt_tokens is not None:
                    outcome.num_prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                if choice.has_tokens:
                    outcome.add_tokens(1, now_s)
                    self._parts.append(choice.added_text)
                if choice.finish_reason is not None:
                    outcome.end_s = now_s
                    self._is_done = True

    def end(self, tokenizer: Tokenizer | None) -> None:
        outcome = self._outcome
        outcome.text = "".join(self._parts)
        if not outcome.error and not outcome.chunk_times_s:
            outcome.error = "no token came"
        elif not outcome.error and not self._is_done:
            outcome.error = "the stream ended early"
        num_tokens = self._num_output_tokens
        if num_tokens is None and tokenizer is not None:
            num_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
        num_chunks = len(outcome.chunk_times_s)
        outcome.num_output_tokens = num_chunks if num_tokens is None else num_tokens
        outcome.chunk_tokens = shares(outcome.num_output_tokens, num_chunks)


def shares(total: int, num_parts: int) -> list[int]:
    """Split a number as evenly as possible, larger parts first."""
    return [total // num_parts + (i < total % num_parts) for i in range(num_parts)]


@asynccontextmanager
async def open_server(
    destination: Destination, fields: RequestFields, ready_timeout_s: float
) -> AsyncIterator[OpenTarget]:
    """Find the model and the tokenizer of a running server.

    Raises:
        ConfigError: invalid URL, path or tokenizer.
        EngineDeadError: the server does not list a model.
    """
    is_chat = destination.backend == OPENAI_CHAT
    path = destination.path
    if not path.endswith("/completions") or path.endswith("/chat/completions") != is_chat:
        raise ConfigError(f"--endpoint {path} does not fit --backend {destination.backend}")
    verified: ssl.SSLContext | bool = not destination.insecure
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verified),  # the load limits concurrency
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=destination.headers,
        trace_configs=[within_origin()],
    ) as session:
        model, root = destination.model, destination.model_id
        if model is None:
            model, root = await _first_model(session, destination.base_url, ready_timeout_s)
        with ExitStack() as closing:
            tokenizer, tokenizer_id = await _tokenizer(session, destination, root, closing)
            body: dict[str, Any] = {"model": model}
            if fields.ignore_eos:
                body["ignore_eos"] = True
            if fields.logprobs is not None and is_chat:
                body |= {"logprobs": True, "top_logprobs": fields.logprobs}
            elif fields.logprobs is not None:
                body["logprobs"] = fields.logprobs
            body |= {**fields.sampling, **fields.extra_body}
            url = f"{destination.base_url}{path}"
            source = PromptSource(
                tokenizer, takes_text=True, takes_token_ids=not is_chat, has_template=not is_chat
            )
            send = HttpTarget(session, url, is_chat, body, tokenizer).send
            counts = partial(_draft_counts, session, f"{destination.base_url}/metrics")
            yield OpenTarget(send, source, root or model, tokenizer_id, counts)


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def _first_model(
    session: aiohttp.ClientSession, base_url: str, timeout_s: float
) -> tuple[str, str]:
    """Return the name and the root of the server's first model."""
    found: list[tuple[str, str]] = []

    async def attempt() -> str:
        url = f"{base_url}/v1/models"
        try:
            async with session.get(url) as response:
                if response.status != 200:
                    hint = " (set the key in OPENAI_API_KEY)" if response.status == 401 else ""
                    return f"{url}: HTTP {response.status}{hint}"
                models = msgspec.json.decode(await read_body(response), type=_Models)
        except aiohttp.ClientConnectorError as error:
            return (
                f"no server answers at {base_url} ({error.strerror or error}): start one with "
                "`nanocore serve MODEL`, or name one with --base-url"
            )
        except _FAILURES as error:
            return f"{url}: {type(error).__name__}: {error}"
        if not models.data:
            return f"{url} lists no model: name one with --model"
        found.append((models.data[0].id, models.data[0].root or models.data[0].id))
        return ""

    await until_ready(attempt, timeout_s)
    return found[0]


async def _tokenizer(
    session: aiohttp.ClientSession, destination: Destination, root: str | None, closing: ExitStack
) -> tuple[Tokenizer | None, str | None]:
    """Return the named tokenizer, else the engine's, the server's, or that of a local folder."""
    path = destination.tokenizer
    if path is None and destination.engine_endpoint is not None:
        async with join_engine(destination, 0) as client:
            tokenizer = await engine_tokenizer(client)
            if tokenizer is None:
                raise ConfigError(f"{destination.engine_endpoint}: its model has no tokenizer")
            closing.callback(tokenizer.close)
            return tokenizer, client.model_card.model
    if path is None:
        tokenizer = await _servers_tokenizer(session, destination.base_url)
        if tokenizer is not None:
            closing.callback(tokenizer.close)
            return tokenizer, root
    if path is None and root is not None and (Path(root) / "tokenizer.json").is_file():
        path = root
    if path is None:
        return None, None
    return closing.enter_context(tokenizer_at(path)), path


_DRAFT_SERIES: Final = re.compile(r"^\w+:spec_decode_(\w+)_total(\{.*\})? (\S+)", re.MULTILINE)
_POSITION: Final = re.compile(r'\bposition="(\d{1,4})"')
_METRICS_TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0)


async def _draft_counts(session: aiohttp.ClientSession, url: str) -> DraftCounts:
    """Read the metrics of a `nanocore serve` or of vLLM; those of several engines are added up."""
    counts: Counter[str] = Counter()
    try:
        async with session.get(url, timeout=_METRICS_TIMEOUT) as response:
            text = (await read_body(response)).decode(errors="replace")
        for name, labels, value in _DRAFT_SERIES.findall(text):
            position = _POSITION.search(labels)
            counts[position[1] if position else name] += int(float(value))
    except (*_FAILURES, ConfigError, ValueError, OverflowError):  # it is not needed
        return {}
    return counts


async def _servers_tokenizer(session: aiohttp.ClientSession, base_url: str) -> Tokenizer | None:
    """Return the tokenizer of a `nanocore serve`; other servers do not give theirs."""
    url = f"{base_url}/tokenizer.json"
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return None
            content = await response.read()
        return await asyncio.to_thread(Tokenizer, {"tokenizer.json": content}, url)
    except (*_FAILURES, InvalidRequestError):
        return None
