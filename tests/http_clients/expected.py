"""What all client scripts ask the demo model, and what it answers when it is greedy.

Scripts import this as a neighbour: each is run with the interpreter that has its package, by
test_http_clients.py or by hand, as `python tests/http_clients/NAME.py http://127.0.0.1:8000`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

Error = TypeVar("Error", bound=Exception)
URL: Final = sys.argv[1]
"""The server's, without a path."""
BASE_URL: Final = f"{URL}/v1"
MODEL: Final = "demo"
QUESTION: Final = "What is 123 + 456?"
ANSWER: Final = "123 + 456 = 579"
JSON_QUESTION: Final = f"{QUESTION} Answer as JSON."
SUM: Final = 579
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def ask(text: str = QUESTION) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def refused(kind: type[Error], call: Callable[..., object], **arguments: Any) -> Error:
    """The error of this kind that a call must raise."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"{arguments} are not refused")
