"""OpenAITarget: any server of OpenAI's chat completions; its chunks become the events of an answer.

What a server says is taken as it comes: reasoning under either of its names, usage where there is
some. Leaving an answer closes its connection, by which servers know that nobody reads it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import aiohttp
import msgspec

from nanocore.bench.sse import DONE, EventReader
from nanocore.cli.chat.target import Message, TargetEvent
from nanocore.client.chat.events import (
    ChatEvent,
    ChatFinishReason,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.protocol.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
    shorten,
)

CONNECT_TIMEOUT_S: Final = 10.0
_MAX_BODY_BYTES: Final = 2**20
_FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class OpenAITarget:
    """See `ChatTarget`.

    Args:
        url: of the API, to its /v1. api_key: what proves who asks, or None. model: None: the first
            that the server names.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._lengths: dict[str, int | None] = {}
        self._session: aiohttp.ClientSession | None = None
        self.model = model or ""
        self.is_connected = True

    async def open(self) -> None:
        """See `ChatTarget`: finds a model if none was named."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        try:
            models = await self.models()
        except InvalidRequestError:  # it lists none, as some proxies do
            models = []
            if not self.model:
                raise
        if not self.model:
            if not models:
                raise ConfigError(f"{self._url} names no model: name one with --model-name")
            self.model = models[0]

    async def close(self) -> None:
        """See `ChatTarget`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def max_model_len(self) -> int | None:
        """See `ChatTarget`."""
        return self._lengths.get(self.model)

    def news(self) -> str:
        """See `ChatTarget`."""
        return ""

    async def models(self) -> list[str]:
        """See `ChatTarget`."""
        assert self._session is not None, "it is open"
        url = f"{self._url}/models"
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
            async with self._session.get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                data = await _body(response)
            listed = msgspec.json.decode(data, type=_Models)
        except _FAILURES as error:
            raise self._lost(error) from None
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"{url} lists no models: {error}") from None
        self._lengths = {model.id: model.max_model_len for model in listed.data}
        return list(self._lengths)

    async def switch(self, model: str) -> None:
        """See `ChatTarget`."""
        known = await self.models()
        if known and model not in known:
            raise InvalidRequestError(f"there is no model {model!r}: {', '.join(known)}")
        self.model = model

    async def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        """See `ChatTarget`."""
        assert self._session is not None, "it is open"
        body = {
            "model": self.model,
            "messages": [_without_reasoning(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        answer = _Answer()
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(
                f"{self._url}/chat/completions", data=msgspec.json.encode(body), headers=headers
            ) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                yield Started(response.headers.get("x-request-id", ""), (), 0)
                async for data in response.content.iter_any():
                    for event in answer.feed(data):
                        yield event
            yield answer.end()
        except _FAILURES as error:
            raise self._lost(error) from None
        except msgspec.MsgspecError as error:
            raise NanocoreError(
                f"{self._url} sent what is no chunk of an answer: {error}"
            ) from None

    def _lost(self, error: Exception) -> NanocoreError:
        reason = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
            reason = os.strerror(error.os_error.errno)  # its text has what the URL says
        return EngineDeadError(f"no server at {self._url}, or none any more: {reason}")

    async def _refusal(self, response: aiohttp.ClientResponse) -> NanocoreError:
        """What the server says of it, in a line."""
        text = (await _body(response)).decode(errors="replace")
        said = f"{self._url}: HTTP {response.status}: {_message(text)}"
        if response.status in (401, 403):
            return ConfigError(f"{said} (the key is --api-key's, or OPENAI_API_KEY's)")
        if response.status in (429, 503):
            return EngineOverloadedError(said)
        if 400 <= response.status < 500:
            return InvalidRequestError(said)
        return NanocoreError(said)


class _Answer:
    """A stream of chunks."""

    def __init__(self) -> None:
        self._reader = EventReader()
        self._calls: dict[int, int] = {}  # their index to ours, without gaps
        self._usage = _Usage()
        self._finish_reason: str | None = None
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[ChatEvent]:
        """What these bytes bring.

        Raises:
            msgspec.MsgspecError: they are no chunks. NanocoreError: the server says that it failed.
        """
        for event in self._reader.feed(data):
            if event == DONE:
                self._is_over = True
                continue
            chunk = msgspec.json.decode(event, type=_Chunk)
            if chunk.error is not None:
                text = msgspec.json.encode({"error": chunk.error}).decode()
                raise NanocoreError(f"the answer ended with an error: {_message(text)}")
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices[:1]:
                yield from self._delta(choice.delta)
                self._finish_reason = choice.finish_reason or self._finish_reason

    def end(self) -> Finished:
        """Raises EngineDeadError if the answer had not ended."""
        if self._finish_reason is None and not self._is_over:
            raise EngineDeadError("the connection was lost before the answer had ended")
        usage = self._usage
        prompt = usage.prompt_tokens_details or _Details()
        output = usage.completion_tokens_details or _Details()
        reason: Any = self._finish_reason
        return Finished(
            reason if reason in get_args(ChatFinishReason) else "stop",
            Usage(
                usage.prompt_tokens or 0,
                prompt.cached_tokens or 0,
                usage.completion_tokens or 0,
                output.reasoning_tokens or 0,
            ),
        )

    def _delta(self, delta: _Delta) -> Iterator[ChatEvent]:
        if reasoning := delta.reasoning or delta.reasoning_content:
            yield Reasoning(reasoning)
        if text := delta.content or delta.refusal:
            yield Text(text)
        for call in delta.tool_calls or ():
            function = call.function or _Function()
            if call.index not in self._calls:
                index = self._calls[call.index] = len(self._calls)
                yield ToolBegin(index, call.id or f"call_{index}", function.name or "")
            if function.arguments:
                yield ToolArguments(self._calls[call.index], function.arguments)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it, or as much as one reads."""
    body = b""
    async for data in response.content.iter_any():
        body += data
        if len(body) > _MAX_BODY_BYTES:
            break
    return body


def _message(body: str) -> str:
    """What a body of an error says, in one line."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = None
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return shorten(" ".join((value if isinstance(value, str) else body).split()) or "(no reason)")


def _without_reasoning(message: Message) -> Message:
    """Servers that do not know it refuse it, and templates leave earlier thoughts out."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}
