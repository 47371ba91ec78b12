"""In place of a `GrammarSource`, where there can be no structured outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanocore.engine_core.structured.matcher import Compiled
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs


class NoGrammars:
    """Implements `GrammarSource`: every structured output is refused. reason: why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def find(self, wanted: StructuredOutputs, client: int = 0) -> InvalidRequestError:
        return InvalidRequestError(self._reason)

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        done(self.find(wanted))
        return lambda: None

    def close(self) -> bool:
        """There is nothing to close."""
        return True
