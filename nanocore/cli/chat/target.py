"""ChatTarget: who answers, be it an engine on the wire or a server of OpenAI's API.

Nothing else of the command knows which of them it is. What goes wrong is a NanocoreError, whose
text is for the user.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from nanocore.client.chat.events import ChatEvent

Message: TypeAlias = dict[str, Any]
"""Of OpenAI's API: a role, a content, and what else there may be."""


class Resumed(msgspec.Struct, frozen=True):
    """The answer has changed its engine. num_output_tokens: had come before; is_exact: what follows
    is what would have come undisturbed."""

    num_output_tokens: int
    is_exact: bool


TargetEvent: TypeAlias = ChatEvent | Resumed


class ChatTarget(Protocol):
    """From `open` to `close`. One answer at a time."""

    @property
    def model(self) -> str:
        """Its name, or ''."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a conversation at most, if that is known."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether it can be reached, for all that is known."""
        ...

    def news(self) -> str:
        """What there is to tell while one waits for `open` or `switch`, or ''."""
        ...

    def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        """The answer to a conversation; leaving it aborts the request.

        Raises:
            NanocoreError: there is none, or no more of it.
        """
        ...

    async def models(self) -> list[str]:
        """What `switch` may be given, as far as it is known.

        Raises:
            NanocoreError: nobody says.
        """
        ...

    async def switch(self, model: str) -> None:
        """Let another model answer from now on. If that fails, the last one goes on.

        Raises:
            NanocoreError: why it does not.
        """
        ...

    async def open(self) -> None:
        """Find out who answers.

        Raises:
            NanocoreError: nobody does.
        """
        ...

    async def close(self) -> None:
        """End what was opened. Idempotent."""
        ...
