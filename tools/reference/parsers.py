"""The parsers of all commands, found where the commands are registered.

A subcommand of `nanocore` or `nanocore bench` that somebody adds is here by itself: it is called
without arguments, and stopped when it begins to parse them.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from nanocore.cli import main

ROOT = Path(__file__).parents[2]
_PARSE = "parse_known_args"


class _Parsing(BaseException):
    """Nobody who reports errors catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
    raise _Parsing(parser)


def parser_of(target: str) -> argparse.ArgumentParser:
    """The parser that a subcommand, `module:function`, parses with."""
    module, _, function = target.partition(":")
    run = getattr(import_module(module), function)
    with patch.object(argparse.ArgumentParser, _PARSE, _stop):
        try:
            run([])
        except _Parsing as parsing:
            return parsing.parser
    raise LookupError(f"{target} parses no arguments")


@cache
def commands() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """name: (its parser, what it does in a few words), in the order of the commands' own help."""
    found = {}
    for name, (module, text) in main._SUBCOMMANDS.items():
        if name == "bench":
            for kind, (benchmark, measured) in main._BENCHMARKS.items():
                words = f"measure {measured}"
                found[f"nanocore bench {kind}"] = (parser_of(benchmark), words)
        elif name != "run":  # which has the flags of chat
            found[f"nanocore {name}"] = (parser_of(module), text)
    for script, module in _scripts().items():
        parser = import_module(module).build_parser()
        found[script] = (parser, _first_words(parser.description or ""))
    return found


def _scripts() -> dict[str, str]:
    """Those beside `nanocore` itself, and their modules."""
    scripts: dict[str, str] = {}
    for project in (ROOT, ROOT / "conformance"):
        settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
        scripts |= settings["project"]["scripts"]
    return {name: at.partition(":")[0] for name, at in scripts.items() if name != "nanocore"}


def _first_words(description: str) -> str:
    sentence = description.partition(". ")[0].removesuffix(".")
    return sentence[0].lower() + sentence[1:]


def actions_of(group: argparse._ArgumentGroup) -> Sequence[argparse.Action]:
    """What --help shows of it, but for what every command has."""
    hidden = (argparse._HelpAction, argparse._VersionAction)
    return [
        one
        for one in group._group_actions
        if one.help != argparse.SUPPRESS and not isinstance(one, hidden)
    ]
