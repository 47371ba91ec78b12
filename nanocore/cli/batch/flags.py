"""`nanocore batch`: its flags; all others are the engine's."""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore.cli.engine_choice import (
    EngineChoice,
    add_engine_flags,
    check_url_alone,
    choose_engine,
    engine_command_parser,
    find_engine,
)
from nanocore.cli.response_flags import add_response_flags, check_tokenizer, response_settings
from nanocore.http.server_settings import MAX_BODY_BYTES, AppSettings
from nanocore.protocol.errors import ConfigError
from nanocore.system.flags import FlagParser, at_least, server_url, values_of

_EXIT_CODES: Final = """\
exit codes: 0 every line succeeded, 1 every line has a result, some are errors, 2 usage or
configuration, 3 model files, 4 memory, 70 internal error or engine failure, 130 interrupted"""
SERVER_CONCURRENCY: Final = 64
"""Concurrent requests to a server, whose limits are not known."""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """input, output: paths, or "-". url: of a server; None: an engine. max_concurrency: None: by
    the engine's limits.
    """

    input: str
    output: str
    app: AppSettings
    engine: EngineChoice
    url: str | None
    max_concurrency: int | None


def parse(arguments: list[str]) -> BatchOptions:
    """Read the command line.

    Raises:
        ConfigError: an invalid flag or value.
        SystemExit: --help or --version.
    """
    parser = build_parser()
    files = []
    for argument in arguments[:2]:
        if argument.startswith("-") and argument != "-":
            break
        files.append(argument)
    given, others = parser.split(arguments[len(files) :])
    named = [given.input_file, given.output_file]
    if files and named != [None, None]:
        raise ConfigError(f"{files[0]}: give either IN OUT, or -i IN -o OUT")
    if len(files) != 2 and None in named:
        raise ConfigError("give an input and an output first: nanocore batch IN OUT [flags]")
    found = None
    if given.url is None:
        found = find_engine(given, given.model, others)
    else:
        check_url_alone(parser, given, given.model, others)
    check_tokenizer(given.tokenizer)
    source, target = files or named
    return BatchOptions(
        input=source,
        output=target,
        app=AppSettings(**response_settings(given, found), stored_responses_bytes=0),
        engine=choose_engine(parser, given, given.model, others, model_is_first=False, found=found),
        **values_of(BatchOptions, given),
    )


def build_parser() -> FlagParser:
    parser = engine_command_parser(
        "nanocore batch",
        "IN OUT",
        "Run requests from a file: IN has a JSON Lines record for each, in the form of OpenAI's "
        "batches, and OUT gets one for each result. Requests with a result in OUT are skipped. By "
        "default the model is the one that an engine or server of this user serves, or the demo "
        "model if none runs.",
        _EXIT_CODES,
    )
    add = parser.add_argument_group("files").add_argument
    add("-i", "--input-file", metavar="IN", help="- is standard input")
    add("-o", "--output-file", metavar="OUT", help="- is standard output")
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    engine.add_argument("--url", type=server_url,
        help="send the requests to a server of OpenAI's API instead, e.g. http://127.0.0.1:8000, "
        "with the key in OPENAI_API_KEY")  # fmt: skip
    engine.add_argument("--max-concurrency", type=at_least(1), metavar="N",
        help="concurrent requests (default: twice as many as the engine runs; "
        f"{SERVER_CONCURRENCY} with --url)")  # fmt: skip
    responses = parser.add_argument_group("responses")
    add_response_flags(responses)
    responses.add_argument("--max-body-bytes", type=at_least(1), default=MAX_BODY_BYTES,
        metavar="N", help=f"bytes of a request's body (default: {MAX_BODY_BYTES})")  # fmt: skip
    return parser
