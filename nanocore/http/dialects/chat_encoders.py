"""Events to what /v1/chat/completions answers: one object, or a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from nanocore.client.chat.events import (
    AnswerCollector,
    ChatEvent,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
)
from nanocore.http.dialects.encoders import ChunkEncoder, WholeEncoder
from nanocore.http.dialects.logprobs import chat_logprobs, prompt_logprobs
from nanocore.http.dialects.sse import around, data, escaped
from nanocore.http.dialects.usage import UsageSum

_TEXT = "\x00text"
"""No text of a chunk but the place of one."""


class ChatStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says beside its events, and which of them it shows.

    fingerprint: equal ones promise equal answers to equal requests. echo: a text that goes before
    each sample's.
    """

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    num_samples: int
    num_top_logprobs: int
    logprobs_as_token_ids: bool
    shows_reasoning: bool
    echo: str

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which an object of this kind begins."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def logprobs(self, event: Logprobs) -> list[dict[str, Any]]:
        """Of new tokens."""
        return chat_logprobs(event.tokens, self.num_top_logprobs, self.logprobs_as_token_ids)


class ChatStreamEncoder(ChunkEncoder):
    """Implements `delivery.Encoder`.

    with_usage: a last chunk has it. always_usage: every chunk has it, so far. Texts around a call
    are lines of their own, as in `ChatAnswer`.
    """

    def __init__(self, style: ChatStyle, with_usage: bool, always_usage: bool) -> None:
        super().__init__(style.head("chat.completion.chunk"), with_usage)
        self._style = style
        self._always_usage = always_usage
        self._texts = [
            self._around(index, {"content": _TEXT}) for index in range(style.num_samples)
        ]
        self._num_tokens = 0
        self._with_text: set[int] = set()
        self._split: set[int] = set()

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """The chunks of these events."""
        self._num_tokens = num_output_tokens
        if len(events) == 1 and not self._always_usage:
            only = events[0]
            if type(only) is Text and only.index not in self._split:
                self._with_text.add(only.index)
                before, after = self._texts[only.index]
                return before + escaped(only.delta) + after
        chunks: list[bytes] = []
        for place, event in enumerate(events):
            if not isinstance(event, Logprobs):
                following = events[place + 1] if place + 1 < len(events) else None
                chunks += self._chunks(event, self._carried(event, following))
            elif place == 0 or self._carried(events[place - 1], event) is None:
                chunks.append(self._chunk(event.index, {}, event))
        return b"".join(chunks)

    # -- inside -----------------------------------------------------------------------------------

    def _carried(self, event: ChatEvent, following: ChatEvent | None) -> Logprobs | None:
        """The log probabilities that go with an event: those of the tokens that brought it."""
        if not isinstance(following, Logprobs):
            return None
        if isinstance(event, Reasoning) and not self._style.shows_reasoning:
            return None
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            return following if event.index == following.index else None
        return None

    def _chunks(self, event: ChatEvent, logprobs: Logprobs | None) -> list[bytes]:
        match event:
            case Started():
                return self._first_chunks(event)
            case Text():
                line_break = "\n" if event.index in self._split else ""
                self._split.discard(event.index)
                self._with_text.add(event.index)
                return [self._chunk(event.index, {"content": line_break + event.delta}, logprobs)]
            case Reasoning():
                if not self._style.shows_reasoning:
                    return []
                delta = {"reasoning": event.delta, "reasoning_content": event.delta}
                return [self._chunk(event.index, delta, logprobs)]
            case ToolBegin():
                self._split |= self._with_text & {event.index}
                call = {
                    "index": event.tool_index,
                    "id": event.id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
                return [self._chunk(event.index, {"tool_calls": [call]}, logprobs)]
            case ToolArguments():
                call = {"index": event.tool_index, "function": {"arguments": event.delta}}
                return [self._chunk(event.index, {"tool_calls": [call]}, logprobs)]
            case Finished():
                self._usage.add_sample(event.usage)
                return [self._last_chunk(event)]
            case _:
                raise AssertionError(f"{event} is none of a chat's")

    def _first_chunks(self, event: Started) -> list[bytes]:
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        chunks = []
        for index in range(self._style.num_samples):
            first = self._object(index, {"role": "assistant", "content": self._style.echo})
            if event.seed is not None:
                first["seed"] = event.seed
            chunks.append(data(first))
        return chunks

    def _last_chunk(self, event: Finished) -> bytes:
        last = self._object(event.index, {})
        last["choices"][0] |= {
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        return data(last)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Logprobs | None) -> bytes:
        chunk = self._object(index, delta)
        if logprobs is not None:
            chunk["choices"][0]["logprobs"] = {"content": self._style.logprobs(logprobs)}
        return data(chunk)

    def _object(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        return self._with_count(chunk, self._num_tokens) if self._always_usage else chunk

    def _around(self, index: int, delta: dict[str, Any]) -> tuple[bytes, bytes]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return around({**self._head, "choices": [choice]}, _TEXT)


class ChatAnswerEncoder(WholeEncoder):
    """Implements `delivery.Encoder`: the whole answer at its end."""

    def __init__(self, style: ChatStyle) -> None:
        self._style = style
        self._collector = AnswerCollector()
        self._usage = UsageSum()
        self._started: Started | None = None

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Keep them."""
        for event in events:
            if isinstance(event, Started):
                self._started = event
                self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
            elif isinstance(event, Finished):
                self._usage.add_sample(event.usage)
            self._collector.add(event)
        return b""

    def finish(self) -> bytes:
        """The answer."""
        style = self._style
        choices = []
        for index, answer in enumerate(self._collector.answers()):
            turn = answer.to_message()
            message: dict[str, Any] = {
                "role": "assistant",
                "content": style.echo + answer.content or None
                if answer.tool_calls
                else style.echo + answer.content,
                "refusal": None,
                "annotations": [],
                "tool_calls": turn.get("tool_calls", []),
            }
            if answer.reasoning and style.shows_reasoning:
                message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
            logprobs = None
            if answer.logprobs:
                logprobs = {"content": style.logprobs(Logprobs(answer.logprobs))}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
            )
        whole = {
            **style.head("chat.completion"),
            "choices": choices,
            "usage": self._usage.as_object(),
        }
        if self._started is not None:
            whole["seed"] = self._started.seed
            if self._started.prompt_logprobs is not None:
                whole["prompt_logprobs"] = prompt_logprobs(self._started.prompt_logprobs)
        return msgspec.json.encode(whole)
