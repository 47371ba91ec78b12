"""Why a structured output cannot be had, for whoever asked: what, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from nanocore.engine_core.structured.places import in_lark, in_regex, place_in_schema
from nanocore.engine_core.structured.schema_parts import escaped
from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

_REMEDIES: Final = (
    (r"^Unimplemented keys|^Unknown format", "leave it out, or say it otherwise"),
    (r"^oneOf constraints", "write anyOf, or choices that cannot both hold"),
    (r"^Unsatisfiable|^NoExtension|no token of the model", "no output satisfies it: ask for less"),
    (r"[Ff]uel|too (big|large|many)|precomputation|stack level|limit", "it is too complex"),
    (r"^panic", "llguidance cannot compile it: write it in another way"),
)


def refusal_of(
    wanted: StructuredOutputs,
    reason: str,
    schemas: list[tuple[str, Any]],
    schema_refusal: Callable[[Any], str | None],
) -> InvalidRequestError:
    """What llguidance's reason is to its user.

    schemas: (name of the field within structured_outputs, value) of what was compiled.
    schema_refusal: why a schema is refused, compiled alone; None if it is not.
    """
    if wanted.regex is not None:
        return _error("regex", "", in_regex(wanted.regex, reason), reason)
    if wanted.grammar is not None:
        return _error("grammar", "", in_lark(reason), reason)
    for field, schema in schemas:
        own = reason if len(schemas) == 1 and wanted.json is not None else schema_refusal(schema)
        if own is not None:
            place, key = place_in_schema(schema, own, schema_refusal)
            place += f"/{escaped(key)}" if key else ""
            return _error(field, f" at {place!r}" if place else "", _schema_reason(own), own)
    return _error(wanted.kind, "", in_lark(reason), reason)


def _schema_reason(reason: str) -> str:
    parse_error = re.search(r"\nerror: ([^\n]*)", reason)
    if parse_error is not None:
        return f"invalid regex: {parse_error[1]}"
    if reason.startswith("oneOf constraints"):
        return "oneOf is only supported where at most one choice can hold"
    return reason.partition("\n")[0]


def _error(field: str, place: str, text: str, reason: str) -> InvalidRequestError:
    remedy = next((f" ({words})" for pattern, words in _REMEDIES if re.search(pattern, reason)), "")
    text = "nothing matches" if text.startswith("NoExtension") else text
    return InvalidRequestError(f"structured_outputs.{field}{place}: {shorten(text)}{remedy}")
