"""What a request to /v1/messages holds, as Anthropic names it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from nanocore.http.dialects.sampling import SamplingFields


class Source(msgspec.Struct):
    """Of a document or an image. Only texts are read: type "text" has data, "content" blocks."""

    type: str | None = None
    data: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct):
    """A piece of a message's content. The type says which of the fields it has."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    title: str | None = None
    source: str | Source | None = None
    tool_name: str | None = None


class Turn(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class ToolDefinition(msgspec.Struct):
    """A tool. type: absent or "custom" for those that the client runs; others are the vendor's."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceField(msgspec.Struct):
    """Whether tools may be called, or must. name: of the one, with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """type: "enabled" and "disabled" are told the template; others leave it to the model."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """What the answer's text must be: JSON of a schema."""

    type: str
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct):
    """effort: how much to think. format: of the text."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """What becomes the prompt. Sampling fields are taken and have no effect on its length."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The request. metadata and service_tier are taken and have no effect.

    stop_sequences: what the other dialects call `stop`.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
