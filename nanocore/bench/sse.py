"""What an HTTP server sends, within limits: bodies, server-sent events, and what these say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from nanocore.protocol.errors import ConfigError, shorten

if TYPE_CHECKING:
    import aiohttp

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 2**22
"""Of a line, and of an event's lines together: no chunk of a completion comes near it."""

MAX_BODY_BYTES: Final = 2**20
"""Of a body that is read whole: a list of models, or an error."""


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body, at most its first MAX_BODY_BYTES."""
    body = b""
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            break
    return body[:MAX_BODY_BYTES]


def within_origin() -> aiohttp.TraceConfig:
    """What refuses redirects to another host for a session: prompts and keys would go there, too.

    Raises:
        ConfigError: in the request that would be redirected.
    """
    import aiohttp

    async def check(_session: object, _context: object, redirect: Any) -> None:
        url, headers = redirect.response.url, redirect.response.headers
        location = headers.get("Location") or headers.get("URI") or ""
        try:
            there = str(url.join(type(url)(location)).origin())
        except ValueError:  # none of HTTP
            there = shorten(repr(location))
        if there != str(url.origin()):
            redirect.response.close()
            raise ConfigError(
                f"{url.origin()} redirects to {there}, which is not followed, because prompts and "
                "keys would go there: give that URL, if it is meant"
            )

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(check)
    return tracing


class EventReader:
    """The data of whole events; comments, names and ids are left out.

    Lines end as the standard has it: with CR LF, LF or CR.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_behind_cr = False
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """The events that these bytes complete.

        Raises:
            msgspec.DecodeError: an event has more than MAX_EVENT_BYTES.
        """
        if self._is_behind_cr and received:
            received, self._is_behind_cr = received.removeprefix(b"\n"), False
        if b"\r" in received:
            self._is_behind_cr = received.endswith(b"\r")
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
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


class Usage(msgspec.Struct):
    """As a server counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct):
    """What a chat's chunk adds. Servers name reasoning in two ways."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """text: of completions; delta: of chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def added_text(self) -> str:
        """What is new, reasoning included."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning or self.delta.reasoning_content or "") + (
            self.delta.content or ""
        )

    @property
    def has_tokens(self) -> bool:
        """Whether it brings tokens, maybe without text; not a role alone, nor an end alone."""
        if self.added_text or (self.delta is not None and self.delta.tool_calls):
            return True
        has_role = self.delta is not None and self.delta.role is not None
        return self.finish_reason is None and not has_role


class Chunk(msgspec.Struct):
    """An event of a completion or a chat completion. error: what ended it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(Chunk).decode


def chunk_of(data: bytes) -> Chunk:
    """The chunk that an event's data is; bytes that are no UTF-8 become U+FFFD.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    try:
        return _decode(data)
    except UnicodeDecodeError:
        return _decode(data.decode(errors="replace"))
    except RecursionError:
        raise msgspec.DecodeError("it is too deep") from None
