"""Regular expressions that a checkpoint or an adapter names modules by, which are a stranger's.

They are bounded in length, number, repetitions and time: a pattern can be written that takes hours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError, shorten

MAX_CHARS: Final = 4096
_MAX_NAMES: Final = 100_000
"""Module names as they are, for which models with experts have long lists."""
MAX_REGEXES: Final = 1024
_MAX_REPETITIONS: Final = 10_000
"""Limit for the product of nested ones: `regex` compiles each required repetition."""
_TIMEOUT_S: Final = 1.0
"""Limit for one pattern and name. Sane ones take microseconds."""


class Pattern:
    """A regular expression that matches names from their beginning, as vLLM's do.

    Raises ModelFileError: it is none, or longer than any needs to be.
    """

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._text = text
        if len(text) > MAX_CHARS:
            raise self._error(f"has {len(text)} characters, and none needs {MAX_CHARS}")
        if math.prod(int(count) or 1 for count in re.findall(r"\{(\d+)", text)) > _MAX_REPETITIONS:
            raise self._error(
                f"has more than {_MAX_REPETITIONS} repetitions, more than any model needs"
            )
        import regex  # large, and most checkpoints have no patterns

        try:
            self._compiled: Any = regex.compile(text)
        except Exception as error:  # besides regex.error some of Python's own
            raise self._error(f"cannot be read: {error}") from None

    def match(self, name: str) -> Any:
        """The match of a name's beginning, or None.

        Raises ModelFileError: that is not found out in time.
        """
        try:
            return self._compiled.match(name, timeout=_TIMEOUT_S)
        except TimeoutError:
            raise self._error(f"takes more than {_TIMEOUT_S:g} s to match {name!r}") from None

    def _error(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._source}: the pattern {shorten(repr(self._text))} {why}")


class NameList:
    """Names of modules, and patterns of names, which begin with "re:".

    Raises ModelFileError: see `Pattern`; or there are more than any model needs.
    """

    def __init__(self, source: str, listed: Sequence[str]) -> None:
        patterns = [text.removeprefix("re:") for text in listed if text.startswith("re:")]
        if len(listed) > _MAX_NAMES or len(patterns) > MAX_REGEXES:
            raise ModelFileError(
                f"{source} has {len(listed)} entries, {len(patterns)} of them patterns; at most "
                f"{_MAX_NAMES} and {MAX_REGEXES} are read"
            )
        self._names = frozenset(listed)
        self._patterns = [Pattern(source, text) for text in patterns]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.match(name) for pattern in self._patterns)
