"""What a streamed answer is made of: one vocabulary, whatever dialect will speak it.

For each sample: text, reasoning and tool calls as they come, logprobs if they were asked for, and
one Finished. Once for the request: Started comes first; Failed, if it comes, last. Deltas are never
empty, and joined they are the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from nanocore.client.logprobs import Logprob, PromptLogprobs
from nanocore.protocol.errors import NanocoreError

ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "timeout", "error"]


class Started(msgspec.Struct, frozen=True, gc=False):
    """The engine has accepted the request, and its first news are here.

    prompt_token_ids: of the rendered conversation. num_cached_tokens: of them, found in the prefix
    cache. seed: the first sample's, which the engine has drawn if none was given. prompt_logprobs:
    if they were asked for. not_held: what a lenient schema asks for and the engine's grammar lacks.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int
    seed: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    not_held: Sequence[str] = ()


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text. index: of the request's n samples, here and below."""

    delta: str
    index: int = 0


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thought before its answer."""

    delta: str
    index: int = 0


class ToolBegin(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. tool_index: which of the sample's calls. id: made by us, if not by the
    model."""

    tool_index: int
    id: str
    name: str
    index: int = 0


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: a JSON object's text, unless the model wrote none."""

    tool_index: int
    delta: str
    index: int = 0


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Of each new token, special ones included: its candidates by token id, itself first."""

    tokens: list[dict[int, Logprob]]
    index: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sample. num_cached_tokens: of the prompt's, found in the prefix cache.

    num_reasoning_tokens: of the output's, those that brought reasoning.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A sample has ended.

    finish_reason: "tool_calls" if it stopped, and called tools. stop_reason, message: as those of
    CompletionOutput. is_invalid: an "error" that the request's own parameters bring about.
    """

    finish_reason: ChatFinishReason
    usage: Usage
    stop_reason: int | str | None = None
    message: str | None = None
    index: int = 0
    is_invalid: bool = False


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The request has failed after Started; whoever reads on gets this error raised."""

    error: NanocoreError


ChatEvent: TypeAlias = (
    Started | Text | Reasoning | ToolBegin | ToolArguments | Logprobs | Finished | Failed
)
