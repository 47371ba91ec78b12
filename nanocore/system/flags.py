"""FlagParser, types of flags' values, and suggestions for unknown flags."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn
from urllib.parse import SplitResult, urlsplit

import msgspec

from nanocore import __version__
from nanocore.protocol.errors import ConfigError
from nanocore.system.other_engines import OTHER_NAMES, in_our_words

DEFAULT_NAMESPACE: Final = "nanocore"
_NEARNESS: Final = 0.78
"""Least similarity of a misspelling, from 0 to 1."""


class WholeFlagParser(argparse.ArgumentParser):
    """A parser to which `-md` and `-p` are unknown flags: argparse takes them for `-m d`, `-pp`."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []


class FlagParser(WholeFlagParser):
    """A parser with --version, whose errors are ConfigErrors. Flags cannot be abbreviated.

    has_engine: whether flags that are not its own are an engine's; then those of other engines are
    taken, too. notices: what was done with them, a sentence each.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        usage: str | None = None,
        epilog: str | None = None,
        has_engine: bool = False,
        add_help: bool = True,
    ) -> None:
        super().__init__(prog, usage, description, epilog, allow_abbrev=False, add_help=add_help)
        self._has_engine = has_engine
        self.notices: tuple[str, ...] = ()
        self.add_argument(
            "--version",
            action="version",
            version=f"nanocore {__version__}",
            help="print the version and exit",
        )

    def split(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return (known flags, the others); flags of other engines are renamed or left out."""
        if self._has_engine:
            arguments, self.notices = in_our_words(arguments, self._option_string_actions)
        return self.parse_known_args(arguments)

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, got")
        raise ConfigError(f"{message} ({self.prog} --help lists the flags)")

    def near_match(self, argument: str) -> str | None:
        """Return the flag of this parser that an unknown argument may mean, or None."""
        return near_flag(argument, [*self._option_string_actions])

    def unknown(self, arguments: Sequence[str]) -> str:
        """Return what to say of arguments that nobody knows."""
        return unknown_flags(arguments, [*self._option_string_actions])

    def launch_hint(self, others: Iterable[str], of_engine: Collection[str] = ()) -> str:
        """Return the flags of this parser that flags passed on to an engine may mean, or ''.

        of_engine: its flags.
        """
        return "; ".join(
            f"`{self.prog}` has {near}, and {other} went to the engine"
            for other in others
            if not near_flag(other, of_engine) and (near := self.near_match(other))
        )


def values_of(options: type, given: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags that have the names of a class's own fields."""
    return {name: getattr(given, name) for name in options.__annotations__ if hasattr(given, name)}


def at_least(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Return a type of integers from `least` to `most`."""

    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        limits = f">= {least}" if most == 10**18 else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer {limits}")

    return number


port: Final = at_least(0, 65535)


def metrics_namespace(text: str) -> str:
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits and _")


def seconds(text: str) -> float:
    number = seconds_or_none(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def seconds_or_none(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 <= number < 1e8:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def otlp_url(text: str) -> str:
    """Return the URL of an OTLP collector; without a path it gets /v1/traces."""
    parts = http_url(text, "http://HOST:4318/v1/traces")
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/v1/traces"


def api_url(text: str) -> str:
    """Return the URL of an OpenAI API; without a path it gets /v1."""
    parts = http_url(text, "http://HOST:8000/v1", has_query=False)
    return text.rstrip("/") if parts.path.strip("/") else f"{text.rstrip('/')}/v1"


def server_url(text: str) -> str:
    """Return the URL of a server, without the /v1 of its API."""
    http_url(text, "http://HOST:8000", has_query=False)
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def http_url(text: str, example: str, has_query: bool = True) -> SplitResult:
    """Return the parts of a URL. has_query: whether a query or a fragment is allowed."""
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if is_valid and (has_query or not (parts.query or parts.fragment)):
        return parts
    shown = re.sub("//.*@", "//***@", text)  # there may be a password
    raise argparse.ArgumentTypeError(f"{shown!r} is not a URL such as {example}")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")


def unknown_flags(arguments: Sequence[str], known: Collection[str]) -> str:
    """Return which flags are unknown, without values, and which may be meant.

    known: flags that may be meant.
    """
    flags = [_name(one) for one in arguments if re.match("--?[a-zA-Z]", one)] or arguments[:1]
    near = near_flag(flags[0], known)
    hint = f"did you mean {near}?" if near else "docs/coming-from.md has flags of other engines"
    return f"unknown: {', '.join(flags)}; {hint}"


def _name(argument: str) -> str:
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def near_flag(argument: str, known: Collection[str]) -> str | None:
    """Return the known flag that an unknown argument may mean, or None.

    Other engines' names are looked up first: `--ctx-size` must not become `--block-size`, although
    the spelling is close.
    """
    name = _name(argument)
    if name in known:
        return name
    if name in OTHER_NAMES:
        return OTHER_NAMES[name] if OTHER_NAMES[name] in known else None
    if not name.startswith("--"):
        return None
    longer = [flag for flag in known if flag.startswith(f"{name}-")]
    near = longer if len(longer) == 1 else get_close_matches(name, known, n=1, cutoff=_NEARNESS)
    return near[0] if near else None
