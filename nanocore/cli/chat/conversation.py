"""Conversation: messages so far, and the question that has no response yet.

A question is added to the conversation together with its response. So a failed one can be retried
or abandoned, and no model gets two consecutive user messages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from nanocore.cli.chat.target import Message
from nanocore.protocol.errors import InvalidRequestError
from nanocore.system.private_directory import open_regular, replace_file

MAX_FILE_BYTES: Final = 2**26
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


class SavedChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Content of a file of `/save`; `messages` are those of OpenAI's API."""

    model: str = ""
    sampling: dict[str, Any] = {}
    messages: list[dict[str, Any]]


class Conversation:
    """system: the system prompt, or ''. pending: the question without a response."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Message] = []
        self.pending: Message | None = None

    @property
    def messages(self) -> list[Message]:
        """All messages, the system prompt and the pending question included."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pending = [] if self.pending is None else [self.pending]
        return [*system, *self.turns, *pending]

    def say(self, text: str) -> None:
        """Set the pending question; an earlier one without a response is dropped."""
        self.pending = {"role": "user", "content": text}

    def answer(self, message: Message) -> None:
        assert self.pending is not None, "there is a question"
        self.turns += [self.pending, message]
        self.pending = None

    def take_back(self) -> Message:
        """Remove the user's last message and everything after it; return the message.

        Raises:
            InvalidRequestError: there is no message.
        """
        if self.pending is not None:
            message, self.pending = self.pending, None
            return message
        for i in reversed(range(len(self.turns))):
            if self.turns[i]["role"] == "user":
                message = self.turns[i]
                del self.turns[i:]
                return message
        raise InvalidRequestError("the conversation is empty")

    def clear(self) -> None:
        """Drop all messages except the system prompt."""
        self.turns = []
        self.pending = None

    def replace(self, messages: list[Message]) -> None:
        """Replace all messages; if the last one is the user's, it becomes the pending question."""
        self.clear()
        has_system = bool(messages) and messages[0]["role"] == "system"
        content = messages[0].get("content") if has_system else ""
        is_plain = isinstance(content, str)  # otherwise it stays an ordinary message
        self.system = str(content) if is_plain else ""
        self.turns = messages[has_system and is_plain :]
        if self.turns and self.turns[-1]["role"] == "user":
            self.pending = self.turns.pop()


def save(path: Path, chat: SavedChat) -> None:
    """Write a file of mode 0600, replacing at most an earlier conversation.

    Raises:
        InvalidRequestError: it cannot be written, or has anything but a conversation.
    """
    try:
        if path.exists() and not load(path).messages:
            raise InvalidRequestError(f"{path} holds no conversation: it has no messages")
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error}; not overwritten: choose another name") from None
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(chat), indent=2) + b"\n")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {MAX_FILE_BYTES // 2**20} MiB")
    return data


def load(path: Path) -> SavedChat:
    """Read a file of `save`, or a JSON list of messages.

    Raises:
        InvalidRequestError: it cannot be read, or has anything else.
    """
    data = _read(path)
    try:
        read = msgspec.json.decode(data, type=SavedChat | list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"{path} holds no conversation: {error}") from None
    chat = SavedChat(messages=read) if isinstance(read, list) else read
    for i, message in enumerate(chat.messages):
        if message.get("role") not in _ROLES:
            raise InvalidRequestError(
                f"{path} holds no conversation: messages[{i}] has an unknown role; known: "
                f"{', '.join(_ROLES)}"
            )
    return chat
