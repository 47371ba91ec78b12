"""The whole of a streamed answer, put together from its events."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

import msgspec

from nanocore.client.chat.events import (
    ChatEvent,
    ChatFinishReason,
    Finished,
    Logprobs,
    Reasoning,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.client.logprobs import Logprob


class ToolCall(msgspec.Struct):
    """arguments: what the model wrote, which need not be JSON unless it was forced to."""

    id: str
    name: str
    arguments: str


class ChatAnswer(msgspec.Struct):
    """One sample's answer, as far as its events go.

    content: its text; what follows a call begins a line. finish_reason, usage: None until it has
    ended. logprobs: of each token, if they were asked for.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = msgspec.field(default_factory=list)
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    usage: Usage | None = None

    def to_message(self) -> dict[str, Any]:
        """The turn, to be appended to the conversation."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return turn


async def collect(events: AsyncIterable[ChatEvent]) -> list[ChatAnswer]:
    """The answers that these events make, in the order of their index.

    Raises:
        NanocoreError: what the events raise.
    """
    collector = AnswerCollector()
    async for event in events:
        collector.add(event)
    return collector.answers()


class AnswerCollector:
    """Puts answers together from their events."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}

    def add(self, event: ChatEvent) -> None:
        """The next one."""
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments, Logprobs, Finished)):
            self._parts.setdefault(event.index, _Parts()).add(event)

    def answers(self) -> list[ChatAnswer]:
        """What they make so far, in the order of their index."""
        return [self._parts[index].answer() for index in sorted(self._parts)]


class _Parts:
    """Pieces, which are joined at the end: a text of n pieces costs O(n)."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolBegin, list[str]]] = []
        self._is_split = False
        self._answer = ChatAnswer()

    def add(
        self, event: Text | Reasoning | ToolBegin | ToolArguments | Logprobs | Finished
    ) -> None:
        if isinstance(event, Text):
            self._text += ["\n", event.delta] if self._is_split else [event.delta]
            self._is_split = False
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.delta)
        elif isinstance(event, ToolBegin):
            self._calls.append((event, []))
            self._is_split = bool(self._text)
        elif isinstance(event, ToolArguments):
            self._calls[event.tool_index][1].append(event.delta)
        elif isinstance(event, Logprobs):
            self._answer.logprobs += event.tokens
        else:
            self._answer.finish_reason = event.finish_reason
            self._answer.stop_reason = event.stop_reason
            self._answer.message = event.message
            self._answer.usage = event.usage

    def answer(self) -> ChatAnswer:
        answer = self._answer
        answer.content = "".join(self._text)
        answer.reasoning = "".join(self._reasoning)
        answer.tool_calls = [
            ToolCall(begin.id, begin.name, "".join(arguments)) for begin, arguments in self._calls
        ]
        return answer
