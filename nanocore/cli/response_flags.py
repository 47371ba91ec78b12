"""Flags about reading requests and writing responses, shared by HTTP and batches."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from nanocore.protocol.errors import ConfigError, InvalidRequestError
from nanocore.system.flags import json_object
from nanocore.system.running import Running


def add_response_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--served-model-name", nargs="+", action="extend", default=[], metavar="NAME",
        help="names of the model in requests; responses have the first")  # fmt: skip
    for kind, what in (("tool-call", "tool calls"), ("reasoning", "reasoning")):
        add(f"--{kind}-parser", default="auto", metavar="NAME",
            help=f"format of {what} in the model's output: one of vLLM's names, or none "
            "(default: auto, detected from the chat template)")  # fmt: skip
    add_chat_template_flag(group)
    add("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help="arguments of the chat template, unless a request sets them")  # fmt: skip
    add("--allowed-chat-template-kwargs", nargs="+", action="extend", default=[], metavar="NAME",
        help="further arguments of the chat template that requests may set")  # fmt: skip


def add_chat_template_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="chat template: a file, the text, or the built-in chatml (default: the model's)",
    )


def response_settings(given: argparse.Namespace, found: Running | None = None) -> dict[str, Any]:
    """Return the fields of `AppSettings` that `add_response_flags` has flags for.

    found: a running server whose names of the model and chat template are the defaults.

    Raises:
        ConfigError: a value with which every request would fail, or that has no effect.
    """
    from nanocore.client.chat.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
    from nanocore.client.chat.template import read_template_kwargs

    for flag, name, known in (
        ("--tool-call-parser", given.tool_call_parser, TOOL_PARSERS),
        ("--reasoning-parser", given.reasoning_parser, REASONING_PARSERS),
    ):
        if name not in ("auto", "none", *known):
            raise ConfigError(f"{flag} {name}: choose auto, none, {', '.join(sorted(known))}")
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
    names_there = () if found is None else found.served_model_names
    return {
        "served_model_names": tuple(given.served_model_name) or names_there,
        "max_body_bytes": given.max_body_bytes,
        "tool_parser": _parser_name(given.tool_call_parser),
        "reasoning_parser": _parser_name(given.reasoning_parser),
        "default_chat_template_kwargs": given.default_chat_template_kwargs,
        "allowed_template_kwargs": tuple(given.allowed_chat_template_kwargs),
        "chat_template": read_chat_template(given.chat_template, found),
    }


def read_chat_template(given: str | None, found: Running | None = None) -> str | None:
    """Return the value of `ChatOptions.chat_template` for the flag's.

    found: a running server whose template is the default.

    Raises:
        ConfigError: the file cannot be read, or its template cannot render a question.
    """
    from nanocore.client.chat.template import BUILT_IN_TEMPLATES, MAX_TEMPLATE_CHARS, ChatTemplate
    from nanocore.client.special_tokens import STANDARD_NAMES

    if given is None:
        return None if found is None else found.chat_template
    if given in BUILT_IN_TEMPLATES:
        return given
    text, flag = given, "--chat-template"
    if "{" not in given:
        flag = f"{flag} {given}"
        try:
            with open(given, encoding="utf-8") as file:
                text = file.read(MAX_TEMPLATE_CHARS + 1)
        except FileNotFoundError:
            names = ", ".join(BUILT_IN_TEMPLATES)
            raise ConfigError(
                f"{flag}: there is no such file; built-in templates: {names}; without the flag, "
                "the model's own is used"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{flag} cannot be read: {reason}") from None
    if "{" not in text:
        raise ConfigError(f"{flag} has no chat template: one contains {{{{ }}}} or {{% %}}")
    tokens = {name: f"<{name}>" for name in STANDARD_NAMES}
    try:
        with closing(ChatTemplate(text, tokens, flag)) as template:
            template.render([{"role": "user", "content": "Hello"}])
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
    return text


def _parser_name(text: str) -> str | None:
    return None if text.lower() == "none" else text


def check_tokenizer(folder: str | None) -> None:
    """Raise ConfigError for a folder without a usable tokenizer."""
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"--tokenizer {folder}: no such folder (with a tokenizer.json)")
    from nanocore.client.tokenizer import Tokenizer

    try:
        Tokenizer.from_folder(Path(folder)).close()
    except InvalidRequestError as error:
        raise ConfigError(f"--tokenizer {folder}: {error}") from None
