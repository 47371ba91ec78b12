"""A parameter's flag follows from its declaration: `parameter` declares, `add_flags` builds.

What a field of the configuration may be is its annotation; its default, its place in --help and its
words stand beside it. A flag's text becomes a value here and is held to the annotation by
`field_check`, in the same words as a value given in Python.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields
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

import msgspec

from nanocore.engine_core.field_check import field_types, flag_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Flag:
    """What --help says of a parameter, and where."""

    group: str
    help: str
    aliases: tuple[str, ...]
    metavar: str | None
    reader: Callable[[str], str] | None


def parameter(
    default: T,
    group: str,
    help: str,
    *aliases: str,
    metavar: str | None = None,
    reader: Callable[[str], str] | None = None,
) -> T:
    """Declare a field of a configuration, a dataclass: its default, and its flag.

    group: the heading in --help. help: what it does; a number that is the default is added.
    aliases: other spellings of the flag. metavar: the name of its value. reader: of a choice that
    has other spellings, too.
    """
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        help = f"{help} (default: {default})"
    flag = _Flag(group, help, aliases, metavar, reader)
    # For the type checker a field is of its default's type, as dataclasses.field has it too.
    return field(default_factory=lambda: copy(default), metadata={"flag": flag})


def add_flags(parser: argparse.ArgumentParser, config: type[DataclassInstance]) -> None:
    """The flags of a configuration's parameters, in order, under their groups.

    The parser is one with `argument_default=SUPPRESS`: what is not given is the field's default.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for declared in fields(config):
        flag: _Flag = declared.metadata["flag"]
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        options = _options(field_types(config)[declared.name])
        if flag.metavar is not None:
            options["metavar"] = flag.metavar
        if flag.reader is not None:
            options["type"] = flag.reader
        groups[flag.group].add_argument(
            flag_name(declared.name), *flag.aliases, help=flag.help, **options
        )


def _options(hint: Any) -> dict[str, Any]:
    """How argparse takes a value of this type."""
    if get_origin(hint) in (Union, types.UnionType):
        return _options(get_args(hint)[0])  # None, or a word in place of a number
    if get_origin(hint) is Annotated:
        return _options(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    kind = get_origin(hint) or hint
    return {"type": _READERS[kind]} | ({"metavar": _METAVARS[kind]} if kind in _METAVARS else {})


def _whole(text: str) -> int | str:
    """The number; of what is none the configuration says what it should have been."""
    try:
        return int(text)
    except ValueError:
        return text


def _real(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _json(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text


_READERS: Final = {int: _whole, float: _real, str: str, dict: _json}
_METAVARS: Final = {int: "N", float: "X"}
"""What --help calls a value whose declaration names none."""
