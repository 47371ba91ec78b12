"""AnswerReader: what a server of OpenAI's API sends, as the events of an answer.

Taken are streams of chunks, and answers that come whole, from servers that cannot stream. What is
odd costs itself alone: bytes that are no UTF-8 become U+FFFD, fields of a wrong type are as if they
were not there, and halves of an emoji that come in two chunks are put together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec

from nanocore.bench.sse import DONE, EventReader
from nanocore.client.chat.events import (
    ChatEvent,
    ChatFinishReason,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.protocol.errors import EngineDeadError, NanocoreError, shorten

Object = dict[str, Any]
_MAX_WHOLE_BYTES: Final = 2**26
_STREAM: Final = re.compile(rb"\s*(?:data|event|id|retry)?:")
_HIGH, _SURROGATE = re.compile(r"[\ud800-\udbff]\Z"), re.compile("[\ud800-\udfff]")


def value_of(data: bytes) -> Any:
    """Of a text in JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(data.decode(errors="replace"), strict=False)
    except RecursionError:
        raise ValueError("it is too deep") from None


def object_in(value: Any, key: str) -> Object:
    """The object of this name, or an empty one."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def objects_in(value: Any, key: str) -> list[Object]:
    """Those of the list of this name."""
    found = value.get(key) if isinstance(value, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def text_in(value: Object, key: str) -> str:
    """The text of this name, or ''."""
    return whole(_raw_text(value, key))


def number_in(value: Object, key: str) -> int | None:
    """The whole number of this name, from 0 on."""
    found = value.get(key)
    return found if type(found) is int and found >= 0 else None


def whole(text: str) -> str:
    """It with pairs of surrogates joined, and those without their other half replaced."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def said_in(body: str) -> str:
    """What a body of an error says, in one line."""
    try:
        value = value_of(body.encode(errors="replace"))
    except ValueError:
        value = None
    return _said(value, body)


class AnswerReader:
    """One answer, from its first bytes to its last."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._unread = b""  # as long as there was no event
        self._held: dict[object, str] = {}  # the first half of a pair, by what it belongs to
        self._calls: dict[int, int] = {}  # their index to ours, without gaps
        self._usage: Object = {}
        self._finish_reason = ""
        self._has_begun = self._has_choice = self._is_over = False

    def feed(self, data: bytes) -> Iterator[ChatEvent]:
        """What these bytes bring.

        Raises:
            NanocoreError: they are no chunks, or the server says that it failed.
        """
        try:
            events = self._events.feed(data)
        except msgspec.DecodeError as error:
            raise NanocoreError(f"what came is no chunk of an answer: {error}") from None
        if not self._has_begun and len(self._unread) < _MAX_WHOLE_BYTES:
            self._unread = b"" if events else self._unread + data
        for event in events:
            self._has_begun = True
            if event == DONE:
                self._is_over = True
                continue
            try:
                chunk = value_of(event)
            except ValueError as error:
                raise NanocoreError(f"what came is no chunk of an answer: {error}") from None
            yield from self._take(chunk, "delta")

    def end(self) -> Iterator[ChatEvent]:
        """The rest, and Finished.

        Raises:
            NanocoreError: the answer had not ended, or there was none.
        """
        if not self._has_begun and self._unread.strip() and not _STREAM.match(self._unread):
            yield from self._take_whole()
        if not self._finish_reason and not self._is_over:
            raise EngineDeadError("the connection was lost before the answer had ended")
        if not self._has_choice:
            raise NanocoreError("the answer ended before it had begun")
        for key in [*self._held]:
            yield from self._event(key, "", is_end=True)
        reason: Any = self._finish_reason
        prompt = object_in(self._usage, "prompt_tokens_details")
        output = object_in(self._usage, "completion_tokens_details")
        yield Finished(
            reason if reason in get_args(ChatFinishReason) else "stop",
            Usage(
                number_in(self._usage, "prompt_tokens") or 0,
                number_in(prompt, "cached_tokens") or 0,
                number_in(self._usage, "completion_tokens") or 0,
                number_in(output, "reasoning_tokens") or 0,
            ),
            message=None
            if reason
            else "the server did not say why the answer ended: it may be cut",
        )

    def _take_whole(self) -> Iterator[ChatEvent]:
        """An answer that is no stream."""
        body = self._unread.decode(errors="replace")
        try:
            value = value_of(self._unread)
        except ValueError:
            value = None
        yield from self._take(value, "message")
        if not self._has_choice:
            raise NanocoreError(f"what came is no answer of OpenAI's API: {_said(None, body)}")
        self._is_over = True

    def _take(self, chunk: Any, part: str) -> Iterator[ChatEvent]:
        """part: what its choices have, "delta" or "message"."""
        if isinstance(chunk, dict) and (chunk.get("error") or chunk.get("object") == "error"):
            raise NanocoreError(
                f"the answer ended with an error: {_said(chunk, json.dumps(chunk))}"
            )
        self._usage = object_in(chunk, "usage") or self._usage
        for choice in objects_in(chunk, "choices")[:1]:
            self._has_choice = True
            yield from self._delta(object_in(choice, part))
            self._finish_reason = text_in(choice, "finish_reason") or self._finish_reason

    def _delta(self, delta: Object) -> Iterator[ChatEvent]:
        reasoning = _raw_text(delta, "reasoning") or _raw_text(delta, "reasoning_content")
        yield from self._event(Reasoning, reasoning)
        parts = [_raw_text(part, "text") for part in objects_in(delta, "content")]
        text = _raw_text(delta, "content") or "".join(parts) or _raw_text(delta, "refusal")
        yield from self._event(Text, text)
        for i, call in enumerate(objects_in(delta, "tool_calls")):
            function, theirs = object_in(call, "function"), number_in(call, "index")
            theirs = i if theirs is None else theirs
            if theirs not in self._calls:
                index = self._calls[theirs] = len(self._calls)
                yield ToolBegin(
                    index, text_in(call, "id") or f"call_{index}", text_in(function, "name")
                )
            yield from self._event(self._calls[theirs], _raw_text(function, "arguments"))

    def _event(self, key: object, text: str, is_end: bool = False) -> Iterator[ChatEvent]:
        """More text of a kind, or of a call's arguments, up to what may be half a pair."""
        text = self._held.pop(key, "") + text
        if not is_end and _HIGH.search(text):
            text, self._held[key] = text[:-1], text[-1]
        if text := whole(text):
            if isinstance(key, int):
                yield ToolArguments(key, text)
            else:
                yield Reasoning(text) if key is Reasoning else Text(text)


def _raw_text(value: Object, key: str) -> str:
    found = value.get(key)
    return found if isinstance(found, str) else ""


def _said(value: Any, body: str) -> str:
    """What an object of an error says, or else its whole body."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    text = whole(value) if isinstance(value, str) else body
    return shorten(" ".join(text.split()) or "(no reason)")
