"""Common parts of the dialects' encoders: usage, server-sent events, and two base classes.

Events are joined from bytes: a prefix, an escaped text, a suffix. Encoding a whole object per token
would cost several times as much as all other work for it, so the parts that do not change from
chunk to chunk are encoded once.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from nanocore.client.chat.events import Usage
from nanocore.http.dialects.request_fields import StreamOptions
from nanocore.http.http_errors import HttpError, openai_body

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": still here\n\n"
"""Keep-alive for proxies, which close silent streams."""
_encode: Final = msgspec.json.Encoder().encode
_LINE_ENDS: Final = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\u0085\u2028\u2029"]
"""Line ends for Python's splitlines, with which many clients read streams."""


class UsageSum:
    """Token counts of a request, over all its prompts and samples."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Add a prompt; to be called once for all its samples."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def add_sample(self, usage: Usage) -> None:
        self.num_output_tokens += usage.num_output_tokens
        self.num_reasoning_tokens += usage.num_reasoning_tokens

    def as_object(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


def on_one_line(json: bytes) -> bytes:
    """Escape line ends of every kind in JSON."""
    if b"\xe2\x80" in json or b"\xc2\x85" in json:
        for character, escape in _LINE_ENDS:
            json = json.replace(character, escape)
    return json


def escaped(value: object) -> bytes:
    """Encode as JSON on one line. Texts hold no lone surrogates: they are decoded UTF-8."""
    return on_one_line(_encode(value))


def data(value: object) -> bytes:
    return b"data: " + escaped(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + escaped(value) + b"\n\n"


def around(value: dict[str, Any], place: str, name: str | None = None) -> tuple[bytes, bytes]:
    """Return an event's bytes before and after one JSON value.

    Args:
        value: the event's object.
        place: placeholder for the value, which occurs once.
        name: the event's.
    """
    whole = data(value) if name is None else event(name, value)
    before, _, after = whole.partition(escaped(place))
    assert after, "the place is there"
    return before, after


class WholeEncoder:
    """Base of encoders that return the whole response at its end."""

    is_stream = False
    keep_alive = b""

    def fail(self, error: HttpError) -> bytes:
        raise AssertionError("nothing is sent before the end")


class ChunkEncoder:
    """Base of encoders of OpenAI's chunk streams.

    Args:
        head: first fields of each chunk; `usage` is null in all but the last, if that has it.
        options: of the request.
    """

    is_stream = True
    keep_alive = COMMENT

    def __init__(self, head: dict[str, Any], options: StreamOptions) -> None:
        self._with_usage = bool(options.include_usage)
        self._always_usage = bool(options.continuous_usage_stats)
        self._head = {**head, "usage": None} if self._with_usage else head
        self._usage = UsageSum()

    def finish(self) -> bytes:
        if not self._with_usage:
            return DONE
        return data({**self._head, "choices": [], "usage": self._usage.as_object()}) + DONE

    def fail(self, error: HttpError) -> bytes:
        return b"data: " + on_one_line(openai_body(error)) + b"\n\n"

    def _with_count(self, chunk: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """Add the usage so far to a chunk. num_tokens: of the output."""
        usage = self._usage.as_object()
        usage["completion_tokens"] = num_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + num_tokens
        return {**chunk, "usage": usage}
