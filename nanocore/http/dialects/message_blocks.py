"""Anthropic's messages of blocks, made the chat messages that templates know.

Texts of one message are joined, results of tools become messages of their own before the text of
the message that brought them, and what the assistant thought and called goes with its turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.http.dialects.message_fields import Block, Source, Turn
from nanocore.http.errors import HttpError, bad_request

_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's first words to its vendor: another number in each request, which would keep the
whole prompt after it from being found in the prefix cache."""
_TEXTS: Final = ("text", "document", "search_result", "tool_reference")


def chat_messages(system: str | list[Block] | None, turns: Sequence[Turn]) -> list[ChatMessage]:
    """The conversation, in order.

    Raises:
        HttpError: a block is of no served type, lacks something, or stands where it cannot.
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


def is_prefilled(turns: Sequence[Turn]) -> bool:
    """Whether the answer goes on where the last message ends.

    Raises:
        HttpError: the last message calls tools, and nobody has answered them.
    """
    last = turns[-1] if turns else None
    if last is None or last.role != "assistant":
        return False
    if any(block.type == "tool_use" for block in _blocks(last.content)):
        raise bad_request(
            "the last message calls tools: send their tool_result blocks in a user message after it"
        )
    return True


def _blocks(content: str | list[Block] | None) -> list[Block]:
    return [Block("text", text=content)] if isinstance(content, str) else content or []


def _system_text(content: str | list[Block] | None, where: str) -> str:
    texts = [
        _BILLING.sub("", _text(block, f"{where}[{i}]"), count=1)
        if _BILLING.match(block.text or "")
        else _text(block, f"{where}[{i}]")
        for i, block in enumerate(_blocks(content))
    ]
    return "\n".join(filter(None, texts))


def _user(blocks: list[Block], where: str, tool_names: dict[str, str]) -> list[ChatMessage]:
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


def _tool_result(block: Block, where: str, tool_names: dict[str, str]) -> ChatMessage:
    call_id = _needed(block.tool_use_id, where, "tool_use_id")
    parts = _blocks(block.content)
    text = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    if block.is_error and "error" not in text.lower():
        text = f"Error: {text}" if text else "Error"  # templates know no other way to say it
    message: ChatMessage = {"role": "tool", "tool_call_id": call_id, "content": text}
    if call_id in tool_names:
        message["name"] = tool_names[call_id]
    return message


def _assistant(blocks: list[Block], where: str, tool_names: dict[str, str]) -> ChatMessage:
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


def _text(block: Block, where: str) -> str:
    """What a block that holds text says."""
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
    raise _unserved(block, where)


def _titled(titles: list[str | None], content: str | list[Block] | None, where: str) -> str:
    """Texts under their titles; blocks in them are no more than text, so nothing nests."""
    texts = []
    for i, part in enumerate(_blocks(content)):
        if part.type != "text":
            place = f"{where}[{i}]"
            raise bad_request(
                f"{place} is of type {part.type[:64]!r}: only text stands here", place
            )
        texts.append(_text(part, f"{where}[{i}]"))
    return "\n".join(filter(None, [*titles, *texts]))


def _needed(value: str | None, where: str, name: str, may_be_empty: bool = False) -> str:
    if value is None or not (value or may_be_empty):
        raise bad_request(f"{where} has no {name}", f"{where}.{name}")
    return value


def _unserved(block: Block, where: str) -> HttpError:
    kind = block.type[:64]
    if block.type in ("image", "document"):
        reason = "this model reads text alone: leave it out, or send its text"
    elif block.type in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"):
        reason = "such a block cannot stand here"
    else:
        reason = f"the types {', '.join(_TEXTS)}, thinking, tool_use and tool_result are served"
    return bad_request(f"{where} is of type {kind!r}: {reason}", where)
