"""Patterns of a JSON Schema as llguidance gets them right.

Where a set of characters has control characters and lacks the quote or the backslash, it would let
the escapes of those two through. So control characters are taken out of each set: but for \\b none
can be written anyway, without \\u. What is rewritten matches less, never more.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

from nanocore.engine_core.structured.schema_parts import parts
from nanocore.protocol.errors import InvalidRequestError

_WITHOUT_CONTROLS: Final = r"--[\x00-\x08\x0e-\x1f]]"
_ESCAPE: Final = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x\w{2}|u\w{4}|U\w{8}|[pP]\w|.)", re.DOTALL)
_BEGIN_OF_SET: Final = re.compile(r"\[\^?\]?")
"""With a bracket that closes nothing, for it is the first."""
_HARMLESS: Final = re.compile(r"\[(?:[^\x00-\x1f\[\\^]|\\[-dws.$()*+?/\[\]\\^{|}])*\]")
"""Sets that can hold no control characters other than white space."""
_VERBOSE: Final = re.compile(r"\(\?[A-Za-z-]*x[A-Za-z-]*[:)]")


def check_pattern(name: str, pattern: str) -> None:
    """Raises:
    InvalidRequestError: it has comments, in which brackets could not be told from sets.
    """
    if _VERBOSE.search(pattern):
        raise InvalidRequestError(
            f"structured_outputs.{name}: the flag x is not supported: write it without"
        )


def with_safe_patterns(schema: Any) -> Any:
    """A copy of which all patterns are rewritten, those of names, too."""
    schema = copy.deepcopy(schema)
    for _, part in parts(schema):
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = safe_pattern(pattern)
        if isinstance(by_name := part.get("patternProperties"), dict):
            part["patternProperties"] = {safe_pattern(key): one for key, one in by_name.items()}
    return schema


def safe_pattern(pattern: str) -> str:
    """It without control characters in its sets, but for white space."""
    safe, i = [], 0
    while i < len(pattern):
        end = _end_of_part(pattern, i)
        part = pattern[i:end]
        is_set = part[0] == "[" and not _HARMLESS.fullmatch(part)
        is_coded = part[0] < " " or part[:2] in (r"\x", r"\u", r"\U", r"\p", r"\P", r"\a")
        safe.append(f"[{part}{_WITHOUT_CONTROLS}" if is_set or is_coded else part)
        i = end
    return "".join(safe)


def _end_of_part(pattern: str, i: int) -> int:
    """Of the set, the escape or the character that begins at i."""
    if pattern[i] == "\\":
        return _end_of_escape(pattern, i)
    if pattern[i] != "[":
        return i + 1
    depth = 0
    while i < len(pattern):
        if pattern[i] == "[":
            depth += 1
            begin = _BEGIN_OF_SET.match(pattern, i)
            i = begin.end() if begin else i + 1
        elif pattern[i] == "\\":
            i = _end_of_escape(pattern, i)
        else:
            depth -= pattern[i] == "]"
            i += 1
            if depth == 0:
                return i
    return len(pattern)


def _end_of_escape(pattern: str, i: int) -> int:
    match = _ESCAPE.match(pattern, i)
    return match.end() if match else i + 1
