"""What a program printed against what its page says; … stands for what differs from run to run."""

from __future__ import annotations

import re

_ANY_LINES = "(?:.*\n)*?"


def pattern(expected: str) -> re.Pattern[str]:
    """Of all outputs that the page allows: … is any text within a line, and alone any lines."""
    parts = []
    for line in expected.rstrip().split("\n"):
        if line.strip() == "…":
            parts.append(_ANY_LINES)
        else:
            parts.append(".*?".join(map(re.escape, line.rstrip().split("…"))) + "\n")
    return re.compile("".join(parts))


def is_as_said(printed: str, expected: str) -> bool:
    """Whether it is; blanks at the ends of lines and empty lines at the end do not count."""
    lines = [line.rstrip() for line in printed.rstrip().split("\n")]
    return pattern(expected).fullmatch("\n".join(lines) + "\n") is not None
