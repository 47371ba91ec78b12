"""Flags that say how requests are read and answered, whether over HTTP or from a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanocore.cli.flag_types import json_object
from nanocore.protocol.errors import ConfigError, InvalidRequestError


def add_answer_flags(group: argparse._ArgumentGroup) -> None:
    """The model's names, the parsers of its answers, and what its chat template is told."""
    add = group.add_argument
    add("--served-model-name", nargs="+", action="extend", default=[], metavar="NAME",
        help="what clients may call the model; the first is its name in answers")  # fmt: skip
    add("--tool-call-parser", default="auto", metavar="NAME",
        help="how answers write tool calls: one of vLLM's names, or none (default: auto, found "
        "out from the chat template)")  # fmt: skip
    add("--reasoning-parser", default="auto", metavar="NAME",
        help="how answers write reasoning: one of vLLM's names, or none (default: auto, found "
        "out from the chat template)")  # fmt: skip
    add("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help="for the chat template, where a request says nothing else")  # fmt: skip
    add("--allowed-chat-template-kwargs", nargs="+", action="extend", default=[], metavar="NAME",
        help="names that requests may set beside the usual ones")  # fmt: skip


def check_answer_flags(given: argparse.Namespace) -> None:
    """Raises ConfigError for values that would fail each request, or could never be of use."""
    from nanocore.client.chat.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
    from nanocore.client.chat.template import read_template_kwargs

    for flag, name, known in (
        ("--tool-call-parser", given.tool_call_parser, TOOL_PARSERS),
        ("--reasoning-parser", given.reasoning_parser, REASONING_PARSERS),
    ):
        if name not in ("auto", "none", *known):
            raise ConfigError(f"{flag} {name}: there are auto, none, {', '.join(sorted(known))}")
    for flag, names in (
        ("--default-chat-template-kwargs", given.default_chat_template_kwargs),
        ("--allowed-chat-template-kwargs", given.allowed_chat_template_kwargs),
    ):
        try:
            read_template_kwargs(dict.fromkeys(names), frozenset(names), ())
        except InvalidRequestError as error:
            raise ConfigError(f"{flag}: {error}") from None
    if "" in given.served_model_name:
        raise ConfigError("--served-model-name '': a name has at least one character")


def parser_name(text: str) -> str | None:
    """A parser's name, as `AppSettings` has it."""
    return None if text.lower() == "none" else text


def check_tokenizer(folder: str | None) -> None:
    """Raises ConfigError for a folder that has no tokenizer which can be used."""
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"--tokenizer {folder}: there is no such folder")
    from nanocore.client.tokenizer import Tokenizer

    try:
        Tokenizer.from_folder(Path(folder)).close()
    except InvalidRequestError as error:
        raise ConfigError(f"--tokenizer {folder}: {error}") from None
