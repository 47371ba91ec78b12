"""`nanocore chat`: its flags; all others are the engine's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from nanocore.cli.chat.commands import with_value
from nanocore.cli.engine_choice import (
    EngineChoice,
    add_engine_flags,
    check_url_alone,
    choose_engine,
    engine_command_parser,
    find_engine,
    parse_with_model,
)
from nanocore.cli.response_flags import add_chat_template_flag, check_tokenizer, read_chat_template
from nanocore.cli.serve.api_keys import check_key
from nanocore.protocol.errors import ConfigError, InvalidRequestError
from nanocore.system.endpoint_lock import own_default_endpoint
from nanocore.system.flags import FlagParser, api_url

_EXIT_CODES: Final = """\
exit codes: 0 end of the chat, or one question was answered, 2 usage or configuration, or an invalid
question, 3 model files, 4 memory, 70 no response, 130 interrupted"""


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """url: of a server; None: an engine. chat_template: see `ChatOptions`. quick: the one question,
    or None."""

    engine: EngineChoice
    chat_template: str | None
    url: str | None
    api_key: str | None
    model_name: str | None
    system: str
    quick: str | None
    sampling: dict[str, Any]

    @property
    def is_prompted(self) -> bool:
        """Whether a user types at a terminal; else there is one question."""
        return self.quick is None and sys.stdin.isatty() and sys.stdout.isatty()


def parse(arguments: list[str], environment: Mapping[str, str]) -> ChatSettings:
    """Read the command line of `nanocore chat` and the environment.

    Raises:
        ConfigError: an invalid flag or value.
        SystemExit: --help or --version.
    """
    return _parse(build_parser(), arguments, environment, None)


def parse_run(arguments: list[str], environment: Mapping[str, str]) -> ChatSettings:
    """Read the command line of `nanocore run MODEL [QUESTION] [flags]`; see `parse`."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if len(words) == 1 and " " in words[0] and not os.path.exists(words[0]):
        raise ConfigError(f"{words[0]!r}: MODEL comes first: nanocore run MODEL QUESTION")
    parser = build_parser("nanocore run", "MODEL [QUESTION]")
    flags = arguments[len(words) :]
    return _parse(parser, [*words[:1], *flags], environment, " ".join(words[1:]) or None)


def _parse(
    parser: FlagParser, arguments: list[str], environment: Mapping[str, str], question: str | None
) -> ChatSettings:
    given, model, others = parse_with_model(parser, arguments)
    found = None
    if given.url is not None:
        check_url_alone(parser, given, model, others, " (--model-name selects one of them)")
    else:
        found = find_engine(given, model, others, by_name=True)
        for name in ("api_key", "model_name"):
            if getattr(given, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for a server, with --url http://HOST:PORT/v1")
    if question is not None:
        if given.quick is not None:
            raise ConfigError(f"two questions, {question!r} and --quick {given.quick!r}: ask one")
        given.quick = question
    if given.quick is not None and not given.quick.strip():
        raise ConfigError("--quick: a message is needed")
    given.endpoint = [one or own_default_endpoint() for one in given.endpoint]
    check_tokenizer(given.tokenizer)
    return ChatSettings(
        engine=choose_engine(parser, given, model, others, found=found),
        chat_template=read_chat_template(given.chat_template, found),
        url=given.url,
        api_key=None if given.url is None else _api_key(given, environment),
        model_name=given.model_name,
        system=given.system_prompt,
        quick=given.quick,
        sampling=_sampling(given.set),
    )


def build_parser(prog: str = "nanocore chat", arguments: str = "[MODEL]") -> FlagParser:
    parser = engine_command_parser(
        prog,
        arguments,
        "Chat with a model; by default with the one that an engine or server of this user serves, "
        "or the demo model if none runs. If standard input or output is not a terminal, the input "
        "is one question, and only its response is written. Input that is piped beside a question "
        "is appended to it.",
        _EXIT_CODES,
    )
    add = parser.add_argument_group("chat").add_argument
    add("--system-prompt", type=_utf8, default="", metavar="TEXT", help="the system prompt")
    add("-q", "--quick", type=_utf8, metavar="MESSAGE",
        help="ask this, print the response, and exit")  # fmt: skip
    add("--set", type=_utf8, action="append", default=[], metavar="NAME=VALUE",
        help="a sampling parameter, e.g. temperature=0; may be repeated")  # fmt: skip
    after_restarts = "then, and with 0, the next question starts it again"
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine, "", after_restarts)
    add_chat_template_flag(engine)
    add = parser.add_argument_group("any server of OpenAI's API").add_argument
    add("--url", type=api_url, help="URL of its API, e.g. http://127.0.0.1:8000/v1")
    add("--model-name", type=_utf8, metavar="NAME",
        help="one of the server's models (default: the first it lists)")  # fmt: skip
    add("--api-key", metavar="KEY",
        help="the server's; visible to other users in the process list, unlike OPENAI_API_KEY "
        "in the environment (the default)")  # fmt: skip
    return parser


def _sampling(given: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in given:
        name, is_there, text = one.partition("=")
        if not is_there or not text:
            raise ConfigError(f"--set {one}: NAME=VALUE is needed, e.g. temperature=0")
        try:
            values = with_value(values, name, text)
        except InvalidRequestError as error:
            raise ConfigError(f"--set {one}: {error}") from None
    return values


def _api_key(given: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the key without the line ends that files and variables may have."""
    source, key = "--api-key", (given.api_key or "").strip()
    if urlsplit(given.url).username is not None:
        if key:
            raise ConfigError("--api-key, and a user in --url: give one of them")
        return None
    if not key:
        source, key = "OPENAI_API_KEY", environment.get("OPENAI_API_KEY", "").strip()
    if not key:
        return None
    check_key(source, key)
    return key


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it is not UTF-8") from None
    return text
