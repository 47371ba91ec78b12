"""OpenAIChatTarget: a chat with any server of OpenAI's chat completions.

`ResponseReader` accepts streams of chunks and complete responses. Malformed parts are ignored:
invalid UTF-8 becomes U+FFFD, and fields of a wrong type count as missing. Abandoning a response
closes its connection, so the server notices. No error shows credentials, neither those in the URL
nor those that a server echoes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Final, get_args
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from nanocore.bench.sse import DONE, EventReader, read_body, within_origin
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
    ContextLengthError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
    shorten,
)

CONNECT_TIMEOUT_S: Final = 10.0
_FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError)
_MIN_SECRET_CHARS: Final = 6
"""Shorter secrets are not masked: that would mask common words."""
_TRUST: Final = "SSL_CERT_FILE names a file of the certificates to trust"
_MAX_COMPLETE_BYTES: Final = 2**26
_STREAM: Final = re.compile(rb"\s*(?:data|event|id|retry)?:")


class OpenAIChatTarget:
    """A target as `EngineChatTarget` is one.

    Args:
        url: of the API, up to its /v1; may contain `user:password@`.
        model: None uses the first that the server lists.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        secrets = [api_key or ""]
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        if parts.username is not None:
            user, password = unquote(parts.username), unquote(parts.password or "")
            basic = b64encode(f"{user}:{password}".encode()).decode()
            secrets += [user, password, basic]
            self._headers = {"authorization": f"Basic {basic}"}
        self._secrets = [secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS]
        self._listed: dict[str, dict[str, Any]] = {}  # the server's models
        self._session: aiohttp.ClientSession | None = None
        self.model = model or ""
        self.is_connected = True

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, headers=self._headers, trace_configs=[within_origin()]
        )
        try:
            models = await self.models()
        except InvalidRequestError as error:  # some proxies list no models
            models = []
            if not self.model:
                raise ConfigError(f"{error}; name one with --model-name") from None
        if not self.model:
            if not models:
                raise ConfigError(f"{self._url} lists no model: name one with --model-name")
            self.model = models[0]

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def max_model_len(self) -> int | None:
        return _number(self._listed.get(self.model, {}), "max_model_len")

    @property
    def default_sampling(self) -> Mapping[str, Any] | None:
        listed = self._listed.get(self.model, {})
        return _object(listed, "default_sampling") if "default_sampling" in listed else None

    def facts(self) -> Mapping[str, str]:
        length = self.max_model_len
        context = {} if length is None else {"context": f"{length:,} tokens"}
        return {**context, "server": self._url}

    async def models(self) -> list[str]:
        assert self._session is not None, "it is open"
        url = f"{self._url}/models"
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
            async with self._session.get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                data = await read_body(response)
        except _FAILURES as error:
            raise self._lost(error) from None
        try:
            listed = _decode(data)
        except ValueError as error:
            raise InvalidRequestError(f"{url} lists no models: {error}") from None
        self._listed = {
            name: model for model in _objects(listed, "data") if (name := _text(model, "id"))
        }
        return list(self._listed)

    async def switch(self, model: str) -> None:
        known = await self.models()
        if known and model not in known:
            raise InvalidRequestError(f"unknown model {model!r}; the server has {', '.join(known)}")
        self.model = model

    async def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        body = {
            "model": self.model,
            # Servers that do not know this field refuse it; templates drop earlier reasoning.
            "messages": [
                {key: value for key, value in message.items() if key != "reasoning_content"}
                for message in messages
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        reader = ResponseReader()
        try:
            async with await self._post(body) as response:
                yield Started(response.headers.get("x-request-id", ""), (), 0)
                async for data in response.content.iter_any():
                    for event in reader.feed(data):
                        yield event
            for event in reader.end():
                yield event
        except _FAILURES as error:
            raise self._lost(error) from None
        except NanocoreError as error:
            error.args = (self._masked(str(error)), *error.args[1:])
            raise

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Return a response of status 200."""
        assert self._session is not None, "it is open"
        data = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        url = f"{self._url}/chat/completions"
        response = await self._session.post(url, data=data, headers=headers)
        if response.status == 200:
            return response
        async with response:
            raise await self._refusal(response)

    def _lost(self, error: Exception) -> NanocoreError:
        if isinstance(error, aiohttp.TooManyRedirects):
            return ConfigError(f"{self._url} redirects without end: give another URL")
        reason = str(error) or f"no response within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            cause = getattr(error.certificate_error, "verify_message", "") or reason
            return ConfigError(f"{self._url}: its certificate is not trusted: {cause} ({_TRUST})")
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
            cause = error.os_error  # the error's own text contains the URL
            if isinstance(cause, ssl.SSLError):
                return ConfigError(f"{self._url}: TLS fails: {cause.reason or cause.strerror}")
            is_name = isinstance(cause, socket.gaierror)
            reason = str(cause.strerror) if is_name else os.strerror(cause.errno or 0)
        return EngineDeadError(f"cannot reach a server at {self._url}: {reason}")

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def _refusal(self, response: aiohttp.ClientResponse) -> NanocoreError:
        data = await read_body(response)
        try:
            value = _decode(data)
        except ValueError:
            value = None
        reason = _error_text(value, data)
        text = self._masked(f"{self._url}: HTTP {response.status}: {reason}")
        wait = response.headers.get("retry-after", "")
        if wait.isdecimal():
            text += f" (retry after {wait} s)"
        if response.status in (401, 403):
            return ConfigError(f"{text} (set the key by --api-key or OPENAI_API_KEY)")
        if response.status in (429, 503):
            return EngineOverloadedError(text)
        if _text(_object(value, "error"), "code") == "context_length_exceeded":
            return ContextLengthError(text)
        if response.status < 500:
            return InvalidRequestError(text, _text(_object(value, "error"), "param") or None)
        return NanocoreError(text)


class ResponseReader:
    """Turns the bytes of one response into events."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._unread = b""  # all bytes, until the first event
        self._call_index: dict[int, int] = {}  # the server's index of a tool call -> ours
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""
        self._has_begun = self._has_choice = self._is_done = False

    def feed(self, data: bytes) -> Iterator[ChatEvent]:
        """Yield the events that these bytes complete.

        Raises:
            NanocoreError: they are not chunks, or contain an error of the server.
        """
        try:
            events = self._events.feed(data)
        except msgspec.DecodeError as error:
            raise NanocoreError(f"invalid chunk: {error}") from None
        if not self._has_begun and len(self._unread) < _MAX_COMPLETE_BYTES:
            self._unread = b"" if events else self._unread + data
        for event in events:
            self._has_begun = True
            if event == DONE:
                self._is_done = True
                continue
            try:
                chunk = _decode(event)
            except ValueError as error:
                raise NanocoreError(f"invalid chunk: {error}") from None
            yield from self._take(chunk, "delta")

    def end(self) -> Iterator[ChatEvent]:
        """Yield the last events: a complete response, and Finished.

        Raises:
            NanocoreError: the response was incomplete or missing.
        """
        if not self._has_begun and self._unread.strip() and not _STREAM.match(self._unread):
            try:
                value = _decode(self._unread)
            except ValueError:
                value = None
            yield from self._take(value, "message")
            if not self._has_choice:
                reason = _error_text(None, self._unread)
                raise NanocoreError(f"not a response of OpenAI's API: {reason}")
            self._is_done = True
        if not self._finish_reason and not self._is_done:
            raise EngineDeadError("the connection was lost during the response")
        if not self._has_choice:
            raise NanocoreError("the response is empty")
        finish_reason: Any = self._finish_reason
        prompt = _object(self._usage, "prompt_tokens_details")
        output = _object(self._usage, "completion_tokens_details")
        yield Finished(
            finish_reason if finish_reason in get_args(ChatFinishReason) else "stop",
            Usage(
                _number(self._usage, "prompt_tokens") or 0,
                _number(prompt, "cached_tokens") or 0,
                _number(self._usage, "completion_tokens") or 0,
                _number(output, "reasoning_tokens") or 0,
            ),
            message=None
            if finish_reason
            else "the server sent no finish_reason: this may be incomplete",
        )

    def _take(self, chunk: Any, part: str) -> Iterator[ChatEvent]:
        """part: "delta" in chunks, "message" in complete responses."""
        if isinstance(chunk, dict) and (chunk.get("error") or chunk.get("object") == "error"):
            reason = _error_text(chunk, json.dumps(chunk).encode())
            raise NanocoreError(f"the server reported an error: {reason}")
        self._usage = _object(chunk, "usage") or self._usage
        for choice in _objects(chunk, "choices")[:1]:
            self._has_choice = True
            yield from self._delta(_object(choice, part))
            self._finish_reason = _text(choice, "finish_reason") or self._finish_reason

    def _delta(self, delta: dict[str, Any]) -> Iterator[ChatEvent]:
        if reasoning := _text(delta, "reasoning") or _text(delta, "reasoning_content"):
            yield Reasoning(reasoning)
        parts = "".join([_text(part, "text") for part in _objects(delta, "content")])
        if text := _text(delta, "content") or parts or _text(delta, "refusal"):
            yield Text(text)
        for i, call in enumerate(_objects(delta, "tool_calls")):
            function, theirs = _object(call, "function"), _number(call, "index")
            theirs = i if theirs is None else theirs
            if theirs not in self._call_index:
                index = self._call_index[theirs] = len(self._call_index)
                yield ToolBegin(
                    index, _text(call, "id") or f"call_{index}", _text(function, "name")
                )
            if arguments := _text(function, "arguments"):
                yield ToolArguments(self._call_index[theirs], arguments)


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data.decode(errors="replace"), strict=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    found = value.get(key) if isinstance(value, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _text(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    # JSON's escapes can spell half a surrogate pair, which no output can encode.
    return found.encode(errors="replace").decode() if isinstance(found, str) else ""


def _number(value: dict[str, Any], key: str) -> int | None:
    found = value.get(key)
    return found if type(found) is int and found >= 0 else None


def _error_text(value: Any, body: bytes) -> str:
    """Return the message of an error object, or else the whole body, in one line."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    text = value if isinstance(value, str) else body.decode(errors="replace")
    text = text.encode(errors="replace").decode()
    return shorten(" ".join(text.split()) or "(no reason)")
