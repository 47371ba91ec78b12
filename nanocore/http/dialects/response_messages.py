"""Items of a conversation to the messages that a chat template takes.

What the assistant thought, said and called between two turns of others are items of their own here,
and one turn there. System and developer messages at the beginning become one, for many templates
take no second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from nanocore.http.dialects.response_items import Item, texts_in

_LEADING = ("system", "developer")


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """items: as `ItemReader` has read them, or as an answer had them."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    turn: _Turn | None = None
    for item in items:
        kind = item["type"]
        if kind in ("reasoning", "function_call", "custom_tool_call") or (
            item.get("role") == "assistant"
        ):
            if turn is None:
                turn = _Turn()
            turn.add(item)
            if "call_id" in item:
                names[item["call_id"]] = item["name"]
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item)})
        else:
            call_id = item["call_id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": item["output"]}
            messages.append(result | ({"name": names[call_id]} if call_id in names else {}))
    if turn is not None:
        messages.append(turn.message())
    return _with_one_head(messages)


class _Turn:
    """The assistant's."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, item: Item) -> None:
        match item["type"]:
            case "message":
                self._texts += texts_in(item["content"])
            case "reasoning":
                self._reasoning += texts_in(item.get("content") or item["summary"])
            case "function_call":
                self._add_call(item, item["arguments"])
            case _:
                self._add_call(item, msgspec.json.encode({"input": item["input"]}).decode())

    def _add_call(self, item: Item, arguments: str) -> None:
        function = {"name": item["name"], "arguments": arguments}
        self._calls.append({"id": item["call_id"], "type": "function", "function": function})

    def message(self) -> dict[str, Any]:
        content = "\n".join(self._texts)
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            turn["reasoning_content"] = "\n".join(self._reasoning)
        if self._calls:
            turn["content"] = content or None
            turn["tool_calls"] = self._calls
        return turn


def _content(item: Item) -> str | list[dict[str, Any]]:
    """One part is its text; of several, the template's dialect knows what to do."""
    texts = texts_in(item["content"])
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _with_one_head(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    num = next((i for i, m in enumerate(messages) if m["role"] not in _LEADING), len(messages))
    if num < 2:
        return messages
    texts: list[str] = []
    for message in messages[:num]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else texts_in(content)
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num:]]
