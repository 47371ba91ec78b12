"""Stop strings: end a text before one of them appears, also when it is split over tokens.

Text that may be the beginning of a stop string is held back until more text decides. The engine
knows nothing of text, so the client looks, and then aborts the request.
"""

from __future__ import annotations


class StopStringMatcher:
    """Watches one request's text.

    Args:
        stops: non-empty strings. include: keep the stop string at the end of the text.
    """

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._min_chars = min(map(len, stops))

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found or None).

        Of several matches the one that ends first wins, and of those the first in the list, so that
        the result does not depend on how the text was cut into pieces.
        """
        if self._held:
            text = self._held + text
            self._held = ""
        if len(text) >= self._min_chars:
            found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
            if found:
                end, stop = min(found, key=lambda match: match[0])
                return text[: end if self._include else end - len(stop)], stop
        num_held = 0
        for stop in self._stops:
            num_held = max(num_held, _overlap(text, stop))
        if num_held:
            text, self._held = text[:-num_held], text[-num_held:]
        return text, None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    if not text:
        return 0
    last = text[-1]
    length = 1 + stop.rfind(last, 0, min(len(text), len(stop) - 1))
    while length and not text.endswith(stop[:length]):
        length = 1 + stop.rfind(last, 0, length - 1)
    return length
