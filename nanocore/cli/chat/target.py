"""ChatTarget: the interface of what responds, an engine on the wire or an OpenAI-compatible server.

Nothing else of the command knows which of them it is. Errors are NanocoreErrors whose text is
written for the user.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from nanocore.client.chat.events import ChatEvent

Message: TypeAlias = dict[str, Any]
"""A message of OpenAI's API."""


class Resumed(msgspec.Struct, frozen=True):
    """Another engine took the request over. num_output_tokens: had come before. is_exact: the
    following tokens are those that would have come undisturbed."""

    num_output_tokens: int
    is_exact: bool


TargetEvent: TypeAlias = ChatEvent | Resumed


class ChatTarget(Protocol):
    """Used from `open` to `close`, for one response at a time. All but `close` may raise
    NanocoreError."""

    @property
    def model(self) -> str:
        """Name of the model, or ''."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Context length in tokens, if known."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether the target can be reached, as far as known."""
        ...

    def news(self) -> str:
        """Return progress of a running `open` or `switch`, or ''."""
        ...

    def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        """Stream the response to a conversation; closing the generator aborts the request."""
        ...

    async def models(self) -> list[str]:
        """Return names for `switch`, as far as known."""
        ...

    async def switch(self, model: str) -> None:
        """Use another model from now on. If that fails, the last one stays."""
        ...

    async def open(self) -> None:
        """Connect, and find out the model."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
