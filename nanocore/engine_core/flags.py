"""Flags of a configuration follow from its fields: `parameter` declares, `add_flags` builds.

A field's annotation, ranges included, says which values it takes; its default, its place in --help
and its help text stand beside it. `check_fields` checks values against the annotation, with the
same errors for flags and for values given in Python. Fields are named as flags, as most users know
them.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import reprlib
import types
from copy import copy
from dataclasses import field, fields
from decimal import Decimal
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
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
_SUFFIXES: Final = (
    "K, M, G and T, also as GiB or GB, stand for powers of 1,024, and k, m, g and t for powers of "
    "1,000"
)


def require(ok: bool, flag: str, value: object, limit: str) -> None:
    """Raise a ConfigError with the flag, its value and the limit, unless ok."""
    if not ok:
        text = shorten(reprlib.repr(value) if isinstance(value, dict) else str(value))
        shown = text if text and text.isprintable() else repr(text)
        raise ConfigError(f"{flag} {shown}: {limit}")


def check_fields(config: DataclassInstance) -> None:
    """Check every field against its annotation.

    Raises:
        ConfigError: which flag, its value, and what it may be.
    """
    hints = field_types(type(config))
    for declared in fields(config):
        name = declared.name
        value, hint = getattr(config, name), hints[name]
        limit = f"must be {describe(hint)}"
        if isinstance(value, str) and re.fullmatch(r"[\d.]+ ?[a-zA-Z]+", value):
            limit += f"; {_SUFFIXES}"
        require(_conforms(value, hint), flag_name(name), value, limit)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def field_types(config: type[DataclassInstance]) -> dict[str, Any]:
    """Annotations of a dataclass's fields, ranges included."""
    return type_hints(config, include_extras=True)


def describe(hint: Any) -> str:
    """Describe a type's values in words."""
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
    """Whether a value is of a type. Objects are JSON: no bytes, NaN, other keys, or cycles."""
    if isinstance(value, float) and math.isnan(value):
        return False  # it is in every range, as msgspec compares
    try:
        msgspec.convert(value, hint)
        return not isinstance(value, dict) or _json(msgspec.json.encode(value)) == value
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError):
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


T = TypeVar("T")


def parameter(
    default: T, help: str, *aliases: str, group: str | None = None, **options: object
) -> T:
    """Declare a field of a configuration dataclass: its default and its flag.

    help: what it does; a number that is the default is added. aliases: other spellings of the flag.
    group: heading in --help of this parameter and those after it. options: argparse's, in place of
    those that follow from the type.
    """
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        help = f"{help} (default: {default})"
    flag = {"aliases": aliases, "group": group, "options": {"help": help} | options}
    # For the type checker a field is of its default's type, as dataclasses.field has it too.
    return field(default_factory=lambda: copy(default), metadata=flag)


def add_flags(parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
    """Add a flag for each parameter of a configuration, in order, under their groups.

    The parser is one with `argument_default=SUPPRESS`: what is not given is the field's default.
    """
    group: argparse._ActionsContainer = parser
    for declared in fields(config):
        flag = declared.metadata
        if flag["group"] is not None:
            group = parser.add_argument_group(flag["group"])
        options = _options(field_types(config)[declared.name]) | flag["options"]
        group.add_argument(flag_name(declared.name), *flag["aliases"], **options)


def _options(hint: Any) -> dict[str, Any]:
    """Return argparse's options for a type."""
    if get_origin(hint) in (Union, types.UnionType, Annotated):
        return _options(get_args(hint)[0])  # without None, a word in place of a number, a range
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    kind = get_origin(hint) or hint
    return {"type": _READERS[kind]} | ({"metavar": _METAVARS[kind]} if kind in _METAVARS else {})


def _whole(text: str) -> int | str:
    """Return the number, or the text: the configuration's check then says what it must be.

    As in vLLM 4k is 4,000, 4K is 4,096, and 1.5k is 1,500. 4KiB and 4KB are 4K.
    """
    if found := re.fullmatch(r"(\d+)([KMGT])(?:i?B)?|(\d+(?:\.\d+)?)([kmgt])", text):
        binary, letter, decimal, small = found.groups()
        if binary:
            return int(binary) << 10 * (1 + "KMGT".index(letter))
        number = Decimal(decimal) * 1000 ** (1 + "kmgt".index(small))
        return int(number) if number == int(number) else text
    try:
        return int(text)
    except ValueError:
        return text


def _real(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _json(text: str | bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text


_READERS: Final = {int: _whole, float: _real, str: str, dict: _json}
_METAVARS: Final = {int: "N", float: "X"}
"""Default metavars of --help."""
