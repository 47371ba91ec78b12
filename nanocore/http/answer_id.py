"""What an answer is called: to its client, and in the engine's traces and log.

The same, so that `nanocore explain` finds it; only a name that a client chose gets an end of its
own, because another client may choose it, too, and the engine's requests have one name each.
"""

from __future__ import annotations

import uuid
from typing import Final

_MAX_CHARS: Final = 200


class AnswerId:
    """prefix: says of what kind it is. given: the client's own, or None."""

    def __init__(self, prefix: str, given: str | None) -> None:
        self.text = f"{prefix}{given or uuid.uuid4().hex}"
        self._is_given = bool(given)

    def engine_id(self, index: int | None = None) -> str:
        """The engine's name of the request. index: of several prompts."""
        name = self.text
        if self._is_given:
            name = f"{name[:_MAX_CHARS]}-{uuid.uuid4().hex[:8]}"
        return name if index is None else f"{name}-{index}"
