"""Conversation: messages so far, and the question that has no response yet.

A question is added to the conversation together with its response. So a failed one can be retried
or abandoned, and no model gets two consecutive user messages.
"""

from __future__ import annotations

from nanocore.cli.chat.target import Message
from nanocore.protocol.errors import InvalidRequestError


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
