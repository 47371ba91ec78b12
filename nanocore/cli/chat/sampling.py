"""What `/set` and `--set` say of sampling: by the names and in the ranges of `SamplingParams`.

What is not set is left to the target: an engine takes what its model's makers recommend.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.sampling import SamplingParams

NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip


def with_value(sampling: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """The same with one more value. text: JSON, or a text as it is; '' takes the name out.

    Raises:
        InvalidRequestError: there is no such name, or it cannot have this value.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise InvalidRequestError(f"nothing is called {name!r}; {hint}")
    changed = {known: value for known, value in sampling.items() if known != name}
    if text:
        changed[name] = _read(name, text)
    return checked(changed)


def checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The same, if all of it can be.

    Raises:
        InvalidRequestError: a name or a value that cannot.
    """
    unknown = [name for name in sampling if name not in NAMES]
    if unknown:
        raise InvalidRequestError(f"nothing is called {unknown[0]!r}")
    SamplingParams(**sampling)
    return dict(sampling)


def words(sampling: Mapping[str, Any]) -> str:
    """What is set, in a line."""
    return ", ".join(
        f"{name}={value if str(value).isprintable() else msgspec.json.encode(value).decode()}"
        for name, value in sampling.items()
    )


def _read(name: str, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if name == "stop" and not isinstance(value, (str, list)) else value
