"""OpenAITarget: any server of OpenAI's chat completions.

What it sends is read by `AnswerReader`. Leaving an answer closes its connection, by which servers
know that nobody reads it. No error shows what proves who asks, be it in the URL or in what a server
says.
"""

from __future__ import annotations

import os
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from nanocore.bench.sse import read_body, within_origin
from nanocore.cli.chat.chunks import (
    AnswerReader,
    number_in,
    objects_in,
    said_in,
    text_in,
    value_of,
)
from nanocore.cli.chat.target import Message, TargetEvent
from nanocore.client.chat.events import Started
from nanocore.protocol.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
)

CONNECT_TIMEOUT_S: Final = 10.0
_FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError)
_MIN_SECRET_CHARS: Final = 6
"""Of what is not shown: what is shorter hides nothing, and words would be hidden with it."""
_TRUST: Final = "SSL_CERT_FILE names a file of the certificates to trust"


class OpenAITarget:
    """See `ChatTarget`.

    Args:
        url: of the API, to its /v1. api_key: what proves who asks, or None. model: None: the first
            that the server names.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        secrets = [api_key or ""]
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        if parts.username is not None:
            user = unquote(parts.username), unquote(parts.password or "")
            basic = b64encode(":".join(user).encode()).decode()
            secrets += [*user, basic]
            self._headers = {"authorization": f"Basic {basic}"}
        self._secrets = [secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS]
        self._lengths: dict[str, int | None] = {}
        self._session: aiohttp.ClientSession | None = None
        self.model = model or ""
        self.is_connected = True

    async def open(self) -> None:
        """See `ChatTarget`: finds a model if none was named."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, headers=self._headers, trace_configs=[within_origin()]
        )
        try:
            models = await self.models()
        except InvalidRequestError as error:  # it lists none, as some proxies do
            models = []
            if not self.model:
                raise ConfigError(f"{error}; name one with --model-name") from None
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
                data = await read_body(response)
        except _FAILURES as error:
            raise self._lost(error) from None
        try:
            listed = value_of(data)
        except ValueError as error:
            raise InvalidRequestError(f"{url} lists no models: {error}") from None
        self._lengths = {
            name: number_in(model, "max_model_len")
            for model in objects_in(listed, "data")
            if (name := text_in(model, "id"))
        }
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
        answer = AnswerReader()
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
            for event in answer.end():
                yield event
        except _FAILURES as error:
            raise self._lost(error) from None
        except NanocoreError as error:
            error.args = (self._discreet(str(error)), *error.args[1:])
            raise

    def _lost(self, error: Exception) -> NanocoreError:
        if isinstance(error, aiohttp.TooManyRedirects):
            return ConfigError(f"{self._url} redirects without end: give another URL")
        reason = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            cause = getattr(error.certificate_error, "verify_message", "") or reason
            return ConfigError(f"{self._url}: its certificate is not trusted: {cause} ({_TRUST})")
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
            cause = error.os_error  # the error's own text has what the URL says
            if isinstance(cause, ssl.SSLError):
                return ConfigError(f"{self._url}: TLS fails: {cause.reason or cause.strerror}")
            is_name = isinstance(cause, socket.gaierror)
            reason = str(cause.strerror) if is_name else os.strerror(cause.errno or 0)
        return EngineDeadError(f"no server at {self._url}, or none any more: {reason}")

    def _discreet(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def _refusal(self, response: aiohttp.ClientResponse) -> NanocoreError:
        """What the server says of it, in a line."""
        text = (await read_body(response)).decode(errors="replace")
        said = f"{self._url}: HTTP {response.status}: {said_in(text)}"
        wait = response.headers.get("retry-after", "")
        if wait.isdecimal():
            said += f" (again in {wait} s)"
        said = self._discreet(said)
        if response.status in (401, 403):
            return ConfigError(f"{said} (the key is --api-key's, or OPENAI_API_KEY's)")
        if response.status in (429, 503):
            return EngineOverloadedError(said)
        if 400 <= response.status < 500:
            return InvalidRequestError(said)
        return NanocoreError(said)


def _without_reasoning(message: Message) -> Message:
    """Servers that do not know it refuse it, and templates leave earlier thoughts out."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}
