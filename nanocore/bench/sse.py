"""Bounded reading of HTTP servers: bodies, server-sent events, and their chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from nanocore.protocol.errors import ConfigError, shorten

if TYPE_CHECKING:
    import aiohttp

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 2**22
"""Limit of an event, far above any chunk of a completion."""

MAX_BODY_BYTES: Final = 2**20
"""Limit of a body that is read as a whole: a list of models, or an error."""


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body, at most its first MAX_BODY_BYTES."""
    body = b""
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            break
    return body[:MAX_BODY_BYTES]


def within_origin() -> aiohttp.TraceConfig:
    """Return a hook for sessions: a redirect to another host raises ConfigError.

    Otherwise prompts and keys would be sent there.
    """
    import aiohttp

    async def check(_session: object, _context: object, redirect: Any) -> None:
        url, headers = redirect.response.url, redirect.response.headers
        location = headers.get("Location") or headers.get("URI") or ""
        try:
            there = str(url.join(type(url)(location)).origin())
        except ValueError:  # not an HTTP URL
            there = shorten(repr(location))
        if there != str(url.origin()):
            redirect.response.close()
            raise ConfigError(
                f"{url.origin()} redirects to {there}, which is not followed, because prompts and "
                "keys would be sent there: use that URL if it is right"
            )

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(check)
    return tracing


class EventReader:
    """Splits a stream into the data of its events. Lines end with LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Return the events that these bytes complete.

        Raises:
            msgspec.DecodeError: an event exceeds MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._num_bytes = 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._num_bytes += len(line)
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise msgspec.DecodeError(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
        return events


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChunkDelta(msgspec.Struct):
    """Servers use two names for reasoning."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChunkChoice(msgspec.Struct):
    """text: of completions. delta: of chat completions."""

    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None

    @property
    def added_text(self) -> str:
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning or self.delta.reasoning_content or "") + (
            self.delta.content or ""
        )

    @property
    def has_tokens(self) -> bool:
        """Whether the chunk has tokens, maybe without text; a role or an end alone has none."""
        if self.added_text or (self.delta is not None and self.delta.tool_calls):
            return True
        has_role = self.delta is not None and self.delta.role is not None
        return self.finish_reason is None and not has_role


class CompletionChunk(msgspec.Struct):
    """An event of a completion or a chat completion."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(CompletionChunk).decode


def chunk_of(data: bytes) -> CompletionChunk:
    """Decode an event's data; invalid UTF-8 becomes U+FFFD.

    Raises:
        msgspec.MsgspecError: it is not a chunk.
    """
    try:
        return _decode(data)
    except (UnicodeDecodeError, msgspec.DecodeError):  # the second one since msgspec 0.23
        return _decode(data.decode(errors="replace"))
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
