"""The objects that endpoints answer, for the OpenAPI document alone: no answer is made of these.

Encoders write answers as bytes; tests send requests and compare what comes with these. A field
without a default is in every answer. Answers may have more fields than are named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Status(msgspec.Struct):
    """How it fares."""

    status: str


class Name(msgspec.Struct):
    """Who answers."""

    name: Literal["nanocore"]
    version: str


class Version(msgspec.Struct):
    """The server's."""

    version: str


class Model(msgspec.Struct):
    """A name of the model, as OpenAI's and Anthropic's APIs show it."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: Count
    created_at: str
    owned_by: str
    root: str
    max_model_len: Count


class ModelList(msgspec.Struct):
    """All names of the model."""

    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: Literal[False]


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: dict[str, Any]
    completion_tokens_details: dict[str, Any]


class CalledFunction(msgspec.Struct):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(msgspec.Struct):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall]
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One sample of the answer."""

    index: Count
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct):
    """OpenAI's chat.completion."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    seed: int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TextChoice(msgspec.Struct):
    """One sample of one prompt's continuation."""

    index: Count
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    seed: int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(msgspec.Struct):
    """OpenAI's text_completion."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: dict[str, Any]


class Embedding(msgspec.Struct):
    """embedding: numbers, or float32 in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    """OpenAI's list of embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, Any]


class Tokens(msgspec.Struct):
    """A text's token ids."""

    tokens: list[int]
    count: Count
    max_model_len: Count
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    """What token ids say."""

    prompt: str


class Response(msgspec.Struct):
    """OpenAI's response."""

    id: str
    object: Literal["response"]
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class DeletedResponse(msgspec.Struct):
    """It is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(msgspec.Struct):
    """Of a stored response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicMessage(msgspec.Struct):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class InputTokens(msgspec.Struct):
    """How long a prompt would be."""

    input_tokens: Count


class OpenAIErrorDetails(msgspec.Struct):
    """param: the field that it is about. code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """An error as OpenAI's APIs have it."""

    error: OpenAIErrorDetails


class AnthropicErrorDetails(msgspec.Struct):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error as Anthropic's API has it."""

    type: Literal["error"]
    error: AnthropicErrorDetails
