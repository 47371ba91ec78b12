"""Conversation: who said what, and the message that nobody has answered yet.

A message enters the conversation with its answer. So one that failed can be asked again, or left
behind, and no model ever sees two of the user's messages in a row.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from nanocore.cli.chat.files import open_regular
from nanocore.cli.chat.target import Message
from nanocore.protocol.errors import InvalidRequestError

MAX_FILE_BYTES: Final = 2**26
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


class SavedChat(msgspec.Struct, kw_only=True):
    """What `/save` writes; `messages` as OpenAI's API takes them."""

    model: str = ""
    sampling: dict[str, Any] = {}
    messages: list[dict[str, Any]]


class Conversation:
    """system: what the model is told first, or ''. pending: a message without an answer."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Message] = []
        self.pending: Message | None = None

    @property
    def messages(self) -> list[Message]:
        """All that is to be sent, or saved."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pending = [] if self.pending is None else [self.pending]
        return [*system, *self.turns, *pending]

    def say(self, text: str) -> None:
        """The user says something, in place of what was not answered."""
        self.pending = {"role": "user", "content": text}

    def answer(self, message: Message) -> None:
        """The answer to what is pending."""
        assert self.pending is not None, "there is a question"
        self.turns += [self.pending, message]
        self.pending = None

    def take_back(self) -> Message:
        """The user's last message, out of the conversation with all that followed.

        Raises:
            InvalidRequestError: there is none.
        """
        if self.pending is not None:
            message, self.pending = self.pending, None
            return message
        for i in reversed(range(len(self.turns))):
            if self.turns[i]["role"] == "user":
                message = self.turns[i]
                del self.turns[i:]
                return message
        raise InvalidRequestError("nothing has been said yet")

    def clear(self) -> None:
        """Begin anew; the system's words stay."""
        self.turns, self.pending = [], None

    def replace(self, messages: list[Message]) -> None:
        """Take these in place of all."""
        self.clear()
        has_system = bool(messages) and messages[0]["role"] == "system"
        content = messages[0].get("content") if has_system else ""
        is_plain = isinstance(content, str)  # else it stays a turn like others
        self.system = str(content) if is_plain else ""
        self.turns = messages[has_system and is_plain :]
        if self.turns and self.turns[-1]["role"] == "user":
            self.pending = self.turns.pop()


def save(path: Path, chat: SavedChat) -> None:
    """Write it to a file that is the user's alone, in place of an earlier conversation.

    Raises:
        InvalidRequestError: it cannot be written, or something else would be lost.
    """
    try:
        if path.exists():
            _check_replaceable(path)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error}; it is left as it is: choose another name") from None
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(chat), indent=2) + b"\n")
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from None


def _check_replaceable(path: Path) -> None:
    """Raises InvalidRequestError for a file that holds what `save` has not written."""
    if not load(path).messages:
        raise InvalidRequestError(f"{path} holds no conversation: there are no messages")
    read = msgspec.json.decode(_read(path))
    others = set(read) - {*SavedChat.__struct_fields__} if isinstance(read, dict) else ()
    if others:
        raise InvalidRequestError(f"{path} holds more than a conversation: {min(others)!r}")


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
    """What is in a file: that of `save`, or a list of messages.

    Raises:
        InvalidRequestError: it cannot be read, or holds something else.
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
                f"{path} holds no conversation: messages[{i}] has a role that is none of "
                f"{', '.join(_ROLES)}"
            )
    return chat
