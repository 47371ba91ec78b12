"""Anthropic's messages of content blocks, converted to the chat messages that templates know.

Texts of one message are joined. Tool results become messages of their own, before the text of the
message that holds them. Thinking and tool calls stay with the assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.http.http_errors import HttpError, bad_request

_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's first line holds a number that differs in each request. Without its removal
the prefix cache would never hit."""
_TEXTS: Final = ("text", "document", "search_result", "tool_reference")


class Source(msgspec.Struct):
    """Source of a document or an image. Only texts are read: data, or blocks in content."""

    type: str | None = None
    data: str | None = None
    content: str | list[ContentBlock] | None = None


class ContentBlock(msgspec.Struct):
    """A piece of a message's content. Which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    title: str | None = None
    source: str | Source | None = None
    tool_name: str | None = None


class MessageParam(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


def chat_messages(
    system: str | list[ContentBlock] | None, turns: Sequence[MessageParam]
) -> list[ChatMessage]:
    """Return the conversation's messages.

    Raises:
        HttpError: a block has an unsupported type, lacks a field, or may not stand there.
    """
    if not turns:
        raise bad_request("messages is empty: send at least one message", "messages")
    instructions = [_system_text(system, "system")]
    messages: list[ChatMessage] = []
    tool_names: dict[str, str] = {}
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        if turn.role == "system":
            text = _system_text(turn.content, where)
            if not messages:
                instructions.append(text)
            else:
                messages.append({"role": "system", "content": text})
        elif turn.role == "user":
            messages += _user(_blocks(turn.content), where, tool_names)
        else:
            messages.append(_assistant(_blocks(turn.content), where, tool_names))
    instruction = "\n".join(filter(None, instructions))
    if instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    return messages


def is_prefilled(turns: Sequence[MessageParam]) -> bool:
    """Whether the response continues the last message.

    Raises:
        HttpError: the last message calls tools, whose results are missing.
    """
    last = turns[-1] if turns else None
    if last is None or last.role != "assistant":
        return False
    if any(block.type == "tool_use" for block in _blocks(last.content)):
        raise bad_request(
            "the last message calls tools: send their tool_result blocks in a user message after it"
        )
    return True


def _blocks(content: str | list[ContentBlock] | None) -> list[ContentBlock]:
    return [ContentBlock("text", text=content)] if isinstance(content, str) else content or []


def _system_text(content: str | list[ContentBlock] | None, where: str) -> str:
    texts = [
        _BILLING.sub("", _text(block, f"{where}[{i}]"), count=1)
        if _BILLING.match(block.text or "")
        else _text(block, f"{where}[{i}]")
        for i, block in enumerate(_blocks(content))
    ]
    return "\n".join(filter(None, texts))


def _user(blocks: list[ContentBlock], where: str, tool_names: dict[str, str]) -> list[ChatMessage]:
    results: list[ChatMessage] = []
    texts = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            results.append(_tool_result(block, f"{where}[{i}]", tool_names))
        else:
            texts.append(_text(block, f"{where}[{i}]"))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _tool_result(block: ContentBlock, where: str, tool_names: dict[str, str]) -> ChatMessage:
    call_id = _needed(block.tool_use_id, where, "tool_use_id")
    parts = _blocks(block.content)
    text = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    if block.is_error and "error" not in text.lower():
        text = f"Error: {text}" if text else "Error"  # templates have no field for errors
    message: ChatMessage = {"role": "tool", "tool_call_id": call_id, "content": text}
    if call_id in tool_names:
        message["name"] = tool_names[call_id]
    return message


def _assistant(blocks: list[ContentBlock], where: str, tool_names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    is_split = False
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            call_id = _needed(block.id, place, "id")
            name = tool_names[call_id] = _needed(block.name, place, "name")
            function = {"name": name, "arguments": block.input or {}}
            calls.append({"id": call_id, "type": "function", "function": function})
            is_split = bool(texts)
        elif block.type != "redacted_thinking":
            texts.append("\n" * is_split + _text(block, place))
            is_split = False
    message: ChatMessage = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: ContentBlock, where: str) -> str:
    """Return the text of a block that holds text; raise HttpError for another one."""
    if block.type == "text":
        return _needed(block.text, where, "text", may_be_empty=True)
    if block.type == "tool_reference":
        return _needed(block.tool_name, where, "tool_name")
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return _titled([block.title, source], block.content, f"{where}.content")
    if block.type == "document" and isinstance(block.source, Source):
        if block.source.type == "text":
            text = _needed(block.source.data, f"{where}.source", "data", may_be_empty=True)
            return _titled([block.title], text, where)
        if block.source.type == "content":
            return _titled([block.title], block.source.content, f"{where}.source.content")
    raise _unsupported(block, where)


def _titled(titles: list[str | None], content: str | list[ContentBlock] | None, where: str) -> str:
    """Join titles and texts. Inner blocks must be text, so recursion ends here."""
    texts = []
    for i, part in enumerate(_blocks(content)):
        if part.type != "text":
            place = f"{where}[{i}]"
            raise bad_request(
                f"{place} is of type {part.type[:64]!r}: only text is allowed here", place
            )
        texts.append(_text(part, f"{where}[{i}]"))
    return "\n".join(filter(None, [*titles, *texts]))


def _needed(value: str | None, where: str, name: str, may_be_empty: bool = False) -> str:
    if value is None or not (value or may_be_empty):
        raise bad_request(f"{where} has no {name}", f"{where}.{name}")
    return value


def _unsupported(block: ContentBlock, where: str) -> HttpError:
    kind = block.type[:64]
    if block.type in ("image", "document"):
        reason = "this model reads text only: leave it out, or send its text"
    elif block.type in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"):
        reason = "such a block is not allowed here"
    else:
        reason = f"the types {', '.join(_TEXTS)}, thinking, tool_use and tool_result are supported"
    return bad_request(f"{where} is of type {kind!r}: {reason}", where)
