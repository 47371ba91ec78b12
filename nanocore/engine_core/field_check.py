"""Holds the values of a configuration to the types of its fields, ranges included.

Types are annotations, ranges `msgspec.Meta` in them: what a field may be is written once, beside
its default, and the words of the error follow from it. Fields are named as flags, for that is how
most users know them.
"""

from __future__ import annotations

import functools
import math
import reprlib
import types
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin
from typing import get_type_hints as type_hints

import msgspec

from nanocore.protocol.errors import ConfigError, shorten

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KINDS: Final = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a JSON object",
}


def require(ok: bool, flag: str, value: object, limit: str) -> None:
    """Raise ConfigError unless ok: which flag, its value, and what it may be."""
    if not ok:
        text = shorten(reprlib.repr(value) if isinstance(value, dict) else str(value))
        shown = text if text and text.isprintable() else repr(text)
        raise ConfigError(f"{flag} {shown}: {limit}")


def check_fields(config: DataclassInstance) -> None:
    """Hold every field to its annotation.

    Raises:
        ConfigError: which flag, its value, and what it may be.
    """
    hints = field_types(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        require(_conforms(value, hint), flag_name(field.name), value, f"must be {describe(hint)}")


def flag_name(name: str) -> str:
    """The flag of the field of this name."""
    return "--" + name.replace("_", "-")


@functools.cache
def field_types(config: type[DataclassInstance]) -> dict[str, Any]:
    """The annotation of each field, ranges included."""
    return type_hints(config, include_extras=True)


def describe(hint: Any) -> str:
    """What a value of this type is, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        *others, last = map(describe, get_args(hint))
        return f"{', '.join(others)} or {last}"
    if get_origin(hint) is Literal:
        choices = ", ".join(map(str, get_args(hint)))
        return f"one of {choices}" if len(get_args(hint)) > 1 else choices
    if get_origin(hint) is Annotated:
        kind, meta = get_args(hint)
        return _KINDS[get_origin(kind) or kind] + _range(meta)
    return "left out" if hint is type(None) else _KINDS[hint]


def _conforms(value: object, hint: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return False  # it is in every range, as msgspec compares
    try:
        msgspec.convert(value, hint)
        return not isinstance(value, dict) or _is_json(value)
    except msgspec.ValidationError:
        return False


def _is_json(value: object) -> bool:
    """Whether JSON says the same: no bytes, no NaN, no key but text, and nothing without end."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value)) == value  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False


def _range(meta: msgspec.Meta) -> str:
    if meta.description is not None:
        return f" {meta.description}"
    low = f" from {meta.ge}" if meta.ge is not None else f" above {meta.gt}"
    if meta.lt is not None:
        return f"{low} to below {meta.lt}"
    if meta.le is None:
        return low
    return f"{low} to {meta.le}" if meta.ge is not None else f"{low}, at most {meta.le}"
