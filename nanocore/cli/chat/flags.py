"""The flags of `nanocore chat`: whom to ask and how is ours, all others are the engine's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from nanocore import __version__
from nanocore.cli.answer_flags import check_tokenizer
from nanocore.cli.api_keys import check_key
from nanocore.cli.chat import sampling
from nanocore.cli.engine_choice import (
    MAX_RESTARTS,
    CommandParser,
    EngineChoice,
    add_engine_flags,
    choose_engine,
    near_match,
)
from nanocore.cli.flag_types import api_url
from nanocore.protocol.errors import ConfigError, InvalidRequestError
from nanocore.system.endpoint_lock import own_default_endpoint

_EXIT_CODES: Final = """\
exit codes: 0 the end, or an answer to one question, 2 usage or configuration, or a question that
cannot be answered, 3 model files, 4 memory, 70 no answer, 130 interrupted"""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """url: of a server; None: the engine is asked. quick: the one question, or None."""

    engine: EngineChoice
    url: str | None
    api_key: str | None
    model_name: str | None
    system: str
    quick: str | None
    is_plain: bool
    sampling: dict[str, Any]

    @property
    def is_prompted(self) -> bool:
        """Whether somebody types at a terminal; else there is one question."""
        return self.quick is None and sys.stdin.isatty() and sys.stdout.isatty()


def parse(arguments: list[str], environment: Mapping[str, str]) -> ChatOptions:
    """What the command line and the environment ask for.

    Raises:
        ConfigError: a flag or a value that cannot be.
        SystemExit: --help or --version.
    """
    parser = build_parser()
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    given, others = parser.parse_known_args(arguments[named is not None :])
    if named is not None and given.model not in (None, named):
        raise ConfigError(f"two models, {named} and --model {given.model}: one of them answers")
    model = given.model if named is None else named
    if given.url is not None:
        _check_url_alone(parser, given, model, others)
    else:
        for name in ("api_key", "model_name"):
            if getattr(given, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for a server, with --url http://HOST:PORT/v1")
    if given.quick is not None and not given.quick.strip():
        raise ConfigError("--quick: a message is needed")
    given.endpoint = [one or own_default_endpoint() for one in given.endpoint]
    check_tokenizer(given.tokenizer)
    return ChatOptions(
        engine=choose_engine(parser, given, model, others),
        url=given.url,
        api_key=None if given.url is None else _api_key(given, environment),
        model_name=given.model_name,
        system=given.system_prompt,
        quick=given.quick,
        is_plain=given.plain,
        sampling=_sampling(given.set),
    )


def build_parser() -> CommandParser:
    """The flags that are ours."""
    parser = CommandParser(
        prog="nanocore chat",
        usage="nanocore chat [MODEL] [flags] [flags of nanocore-engine]",
        description="Chat with a model, by default the bundled one. An engine is launched, and "
        "ends with the chat; flags that are not listed here are its, as `nanocore-engine --help` "
        "lists them. Where standard input or output is no terminal, what is read is one question, "
        "and its answer alone is written.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanocore {__version__}")
    chat = parser.add_argument_group("chat")
    add = chat.add_argument
    add("--system-prompt", type=_text, default="", metavar="TEXT",
        help="what the model is told first")  # fmt: skip
    add("-q", "--quick", type=_text, metavar="MESSAGE",
        help="ask this, print the answer, and end")  # fmt: skip
    add("--set", type=_text, action="append", default=[], metavar="NAME=VALUE",
        help="how tokens are sampled, e.g. temperature=0; may be repeated")  # fmt: skip
    add("--plain", action="store_true", help="Markdown without styles")
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine, bare_endpoint="")
    for action in engine._group_actions:
        if action.dest == "max_restarts":
            action.help = (
                "of an engine that dies, in a row; then, and with 0, it is started again with the "
                f"next question alone (default: {MAX_RESTARTS})"
            )
    server = parser.add_argument_group("any server of OpenAI's API")
    add = server.add_argument
    add("--url", type=api_url, help="of its API, e.g. http://127.0.0.1:8000/v1")
    add("--model-name", type=_text, metavar="NAME",
        help="of the server's models (default: the first that it names)")  # fmt: skip
    add("--api-key", metavar="KEY",
        help="for the server; other users see it in the list of processes (default: that of "
        "OPENAI_API_KEY, if it is set, which they do not see)")  # fmt: skip
    return parser


def _check_url_alone(
    parser: CommandParser, given: argparse.Namespace, model: str | None, others: list[str]
) -> None:
    """Refuse what an engine of ours would be asked with, and what nobody knows."""
    flags = [f"--{name.replace('_', '-')}" for name in (
        "endpoint", "curve_dir", "tokenizer", "start_timeout", "max_restarts",
    ) if getattr(given, name) not in (None, [])]  # fmt: skip
    wrong = [*([] if model is None else [model]), *flags, *others]
    if others and (near := near_match(parser, others[0])):
        raise ConfigError(f"unknown: {others[0]}; did you mean {near}?")
    if wrong:
        raise ConfigError(
            f"--url asks a server that runs, with the models that it has: leave {wrong[0]} out "
            "(--model-name says which of them)"
        )


def _sampling(given: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in given:
        name, is_there, text = one.partition("=")
        if not is_there or not text:
            raise ConfigError(f"--set {one}: NAME=VALUE is needed, e.g. temperature=0")
        try:
            values = sampling.with_value(values, name, text)
        except InvalidRequestError as error:
            raise ConfigError(f"--set {one}: {error}") from None
    return values


def _api_key(given: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Its line ends, as files have them, are no part of it.

    Raises:
        ConfigError: no header can carry it, or the URL has a user, which says who asks, too.
    """
    source, key = "--api-key", (given.api_key or "").strip()
    if urlsplit(given.url).username is not None:
        if key:
            raise ConfigError("--api-key, and --url with a user: a server is told one of them")
        return None
    if not key:
        source, key = "OPENAI_API_KEY", environment.get("OPENAI_API_KEY", "").strip()
    if not key:
        return None
    check_key(source, key)
    return key


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it is no text in UTF-8") from None
    return text
