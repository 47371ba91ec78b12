"""A target whose answers a test writes, and a console that keeps what is written to it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from nanocore.cli.chat.target import Message, TargetEvent
from nanocore.cli.chat.view import View
from nanocore.client.chat.events import Finished, Started, Text, Usage
from nanocore.protocol.errors import InvalidRequestError

Script = Sequence[TargetEvent | Exception | Callable[[], None]]


def answer(text: str, reason: Any = "stop", num_prompt_tokens: int = 7) -> Script:
    """The events of one, a token for each word."""
    words = [f"{word} " for word in text.split()]
    words[-1] = words[-1].rstrip()
    usage = Usage(num_prompt_tokens, 4, len(words), 0)
    return [Started("r", range(num_prompt_tokens), 4), *map(Text, words), Finished(reason, usage)]


class FakeTarget:
    """See `EngineChatTarget`. A function in a script is called, and then the answer waits for ever.

    asked: (messages, sampling) of each question. num_left: answers that were left before their end.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.num_left = 0
        self.model = "fake"
        self.max_model_len: int | None = 100
        self.default_sampling: Mapping[str, Any] | None = None
        self.is_connected = True

    def facts(self) -> Mapping[str, str]:
        return {"context": "100 tokens"}

    async def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        self.asked.append((list(messages), dict(sampling)))
        script = self._scripts.pop(0)
        has_ended = False
        try:
            for event in script:
                if isinstance(event, Exception):
                    raise event
                if callable(event):
                    event()
                    await asyncio.Event().wait()
                    raise AssertionError("nobody sets it")
                yield event
            has_ended = True
        finally:
            self.num_left += not has_ended

    async def models(self) -> list[str]:
        return ["fake", "other"]

    async def switch(self, model: str) -> None:
        if model not in await self.models():
            raise InvalidRequestError(f"there is no model {model!r}")
        self.model = model

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class Shown:
    """A view, and what it has written."""

    def __init__(self, num_columns: int = 80, **console: Any) -> None:
        self._file = io.StringIO()
        self.view = View(Console(file=self._file, width=num_columns, **console))

    @property
    def text(self) -> str:
        return self._file.getvalue()
