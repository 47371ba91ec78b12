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

    def push(self, text: str, is_sought: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found or None).

        is_sought: stop strings may end in this text; if not, none that does is found later either.
        Of several matches the one that ends first wins, and of those the first in the list, so that
        the result does not depend on how the text was cut into pieces.
        """
        num_seen = len(self._held)
        if num_seen:
            text = self._held + text
            self._held = ""
        if is_sought and len(text) >= self._min_chars:
            found = [(end, stop) for stop in self._stops if (end := _end(text, stop, num_seen))]
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


def _end(text: str, stop: str, num_seen: int) -> int:
    """Where `stop` first ends in `text`, beyond its first num_seen characters; 0 if nowhere."""
    start = text.find(stop, max(0, num_seen + 1 - len(stop)))
    return start + len(stop) if start >= 0 else 0


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    if not text:
        return 0
    last = text[-1]
    length = 1 + stop.rfind(last, 0, min(len(text), len(stop) - 1))
    while length and not text.endswith(stop[:length]):
        length = 1 + stop.rfind(last, 0, length - 1)
    return length
