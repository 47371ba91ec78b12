"""Events of a streamed response, and the whole response that they make.

A sample yields text, reasoning and tool calls as they arrive, logprobs if requested, and one
Finished. The request yields Started first, and Failed last if it fails. Deltas are never empty;
joined they are the whole text.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from nanocore.client.requests.request_outputs import Logprob, PromptLogprobs
from nanocore.protocol.errors import NanocoreError

ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "timeout", "error"]


class Started(msgspec.Struct, frozen=True, gc=False):
    """First event: the engine has accepted the request and its first output has arrived.

    prompt_token_ids: of the rendered conversation. num_cached_tokens: those found in the prefix
    cache. seed: of the first sample; drawn by the engine if none was given. prompt_logprobs: if
    requested. not_held: keywords of a lenient schema that are not enforced.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int
    seed: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    not_held: Sequence[str] = ()


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the response. index: sample among the request's n, here and below."""

    delta: str
    index: int = 0


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model wrote as reasoning."""

    delta: str
    index: int = 0


class ToolBegin(msgspec.Struct, frozen=True, gc=False):
    """Beginning of a tool call. tool_index: among the sample's calls. id: the model's, or ours."""

    tool_index: int
    id: str
    name: str
    index: int = 0


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """Part of a call's arguments: text of a JSON object, unless the model wrote something else."""

    tool_index: int
    delta: str
    index: int = 0


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Candidates of each new token by token id, special tokens included; the token itself first."""

    tokens: list[dict[int, Logprob]]
    index: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of one sample. num_cached_tokens: prompt tokens found in the prefix cache.

    num_reasoning_tokens: output tokens that were reasoning.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """End of a sample.

    finish_reason: "tool_calls" if it stopped after calling tools. stop_reason, message: see
    CompletionOutput. is_invalid: an "error" caused by the request's own parameters.
    """

    finish_reason: ChatFinishReason
    usage: Usage
    stop_reason: int | str | None = None
    message: str | None = None
    index: int = 0
    is_invalid: bool = False


class Failed(msgspec.Struct, frozen=True, gc=False):
    """Failure of the request after Started; reading on raises this error."""

    error: NanocoreError


ChatEvent: TypeAlias = (
    Started | Text | Reasoning | ToolBegin | ToolArguments | Logprobs | Finished | Failed
)


class ToolCall(msgspec.Struct):
    """Call in an answer. arguments: as the model wrote them, JSON only if a grammar forced it."""

    id: str
    name: str
    arguments: str


class ChatAnswer(msgspec.Struct):
    """One sample's response, as far as its events have arrived.

    content: its text; text after a call starts on a new line. finish_reason, usage: None until it
    has ended. logprobs: of each token, if requested.
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
        """Return the turn, to be appended to the conversation."""
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
    """Return the responses of these events, in the order of their index; raises NanocoreError."""
    collector = AnswerCollector()
    async for event in events:
        collector.add(event)
    return collector.answers()


class AnswerCollector:
    """Collects responses from their events."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}

    def add(self, event: ChatEvent) -> None:
        """Add the next event."""
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments, Logprobs, Finished)):
            self._parts.setdefault(event.index, _Parts()).add(event)

    def answers(self) -> list[ChatAnswer]:
        """Return the answers so far, in the order of their index."""
        return [self._parts[index].answer() for index in sorted(self._parts)]


class _Parts:
    """Pieces of a text, joined at the end, so that n pieces cost O(n)."""

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
