"""The flags of `nanocore batch`: those of files and answers are ours, all others the engine's."""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore import __version__
from nanocore.cli.answer_flags import (
    add_answer_flags,
    check_answer_flags,
    check_tokenizer,
    parser_name,
)
from nanocore.cli.engine_choice import (
    CommandParser,
    EngineChoice,
    add_engine_flags,
    choose_engine,
)
from nanocore.cli.flag_types import at_least
from nanocore.http.server_settings import MAX_BODY_BYTES, AppSettings
from nanocore.protocol.errors import ConfigError

_EXIT_CODES: Final = """\
exit codes: 0 every line has an answer, 1 every line has a result, and some are errors, 2 usage or
configuration, 3 model files, 4 memory, 70 internal error or the engine's end, 130 interrupted"""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """input, output: paths, or "-". retry_errors: lines whose results are errors are asked again.
    max_concurrency: None: by the engine's limits."""

    input: str
    output: str
    app: AppSettings
    engine: EngineChoice
    retry_errors: bool
    max_concurrency: int | None


def parse(arguments: list[str]) -> BatchOptions:
    """What the command line asks for.

    Raises:
        ConfigError: a flag or a value that cannot be.
        SystemExit: --help or --version.
    """
    parser = build_parser()
    files = []
    for argument in arguments[:2]:
        if argument.startswith("-") and argument != "-":
            break
        files.append(argument)
    given, others = parser.parse_known_args(arguments[len(files) :])
    named = [given.input_file, given.output_file]
    if files and named != [None, None]:
        raise ConfigError(f"{files[0]}: IN OUT, or -i IN -o OUT, and not both")
    if len(files) != 2 and None in named:
        raise ConfigError(
            "an input and an output are needed: nanocore batch IN OUT [flags]; they come first"
        )
    check_tokenizer(given.tokenizer)
    check_answer_flags(given)
    source, target = files or named
    return BatchOptions(
        input=source,
        output=target,
        app=AppSettings(
            served_model_names=tuple(given.served_model_name),
            max_body_bytes=given.max_body_bytes,
            tool_parser=parser_name(given.tool_call_parser),
            reasoning_parser=parser_name(given.reasoning_parser),
            default_chat_template_kwargs=given.default_chat_template_kwargs,
            allowed_template_kwargs=tuple(given.allowed_chat_template_kwargs),
            stored_responses_bytes=0,
        ),
        engine=choose_engine(parser, given, given.model, others, model_is_first=False),
        retry_errors=given.retry_errors,
        max_concurrency=given.max_concurrency,
    )


def build_parser() -> CommandParser:
    """The flags that are ours."""
    parser = CommandParser(
        prog="nanocore batch",
        usage="nanocore batch IN OUT [flags] [flags of nanocore-engine]",
        description="Answer requests from a file: IN has a line of JSON for each, in the form of "
        "OpenAI's batches, and OUT gets one for each result. Results that OUT has already are not "
        "asked for again. An engine is launched, and ends with the command; flags that are not "
        "listed here are its, as `nanocore-engine --help` lists them.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanocore {__version__}")
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", metavar="IN", help="- is standard input")
    files.add_argument("-o", "--output-file", metavar="OUT", help="- is standard output")
    files.add_argument("--retry-errors", action="store_true",
        help="take results that are errors out of OUT, and ask for them again")  # fmt: skip
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    engine.add_argument("--max-concurrency", type=at_least(1), metavar="N",
        help="requests at once (default: twice as many as the engine runs)")  # fmt: skip
    answers = parser.add_argument_group("answers")
    add_answer_flags(answers)
    answers.add_argument("--max-body-bytes", type=at_least(1), default=MAX_BODY_BYTES, metavar="N",
        help=f"of a request (default: {MAX_BODY_BYTES})")  # fmt: skip
    return parser
