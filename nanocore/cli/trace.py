"""`nanocore trace FILE` and `nanocore explain REQUEST [FILE]`: readers of step traces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from nanocore.protocol.errors import ConfigError, counted
from nanocore.system.flags import FlagParser
from nanocore.system.running import all_running
from nanocore.system.standard_streams import harmless
from nanocore.tracing.explanation import explain, read_runs
from nanocore.tracing.reader import TraceError, TraceReader
from nanocore.tracing.summary import RunSummary, summarize
from nanocore.tracing.texts import explanation_text, summary_text

_USUAL_FILE: Final = "steps.jsonl"
_FILE_HELP: Final = (
    "trace of nanocore-engine --step-trace, even while it is being written (default: that of the "
    f"running engine, else {_USUAL_FILE})"
)
_EXIT_CODES: Final = (
    "exit codes: 0 done, 2 usage, or the file or request cannot be read, 130 interrupted"
)


class TraceSummary(msgspec.Struct):
    """Output of `--json`. num_cut_lines: unfinished lines, which were ignored."""

    file: str
    num_cut_lines: int
    runs: list[RunSummary]


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        raise ConfigError(str(error)) from None


def trace_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore trace",
        "Summarize a step trace, as nanocore-engine --step-trace writes it.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help=_FILE_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def explain_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore explain",
        "Explain why a request waited, which cached tokens it found, which request preempted it, "
        "and what its time to first token consists of.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("request", metavar="REQUEST", help="id that the client gave it")
    parser.add_argument("file", metavar="FILE", nargs="?", help=_FILE_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def read_trace(path: str) -> TraceSummary:
    """Summarize a trace.

    Raises:
        TraceError: it is not a trace, or has no steps.
    """
    reader = TraceReader(path)
    runs = read_runs(reader)
    if not runs:
        raise TraceError(f"{path} holds no step; did the engine get any request?")
    return TraceSummary(path, reader.num_cut_lines, [summarize(run) for run in runs])


def run(arguments: list[str]) -> int:
    given = trace_parser().parse_args(arguments)
    with _reporting():
        summary = read_trace(given.file or _default_file())
    if given.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        return 0
    for one in summary.runs:
        print(harmless(summary_text(one)))
    if summary.num_cut_lines:
        print(f"ignored {counted(summary.num_cut_lines, 'unfinished line')}")
    return 0


def run_explain(arguments: list[str]) -> int:
    given = explain_parser().parse_args(arguments)
    with _reporting():
        explanation = explain(given.file or _default_file(), given.request)
    if given.json:
        sys.stdout.write(msgspec.json.encode(explanation).decode() + "\n")
    else:
        print(harmless(explanation_text(explanation)))
    return 0


def _default_file() -> str:
    """Return the trace that an engine of this user is writing, else one here by its usual name.

    Raises:
        ConfigError: several engines write one, or none does.
    """
    paths = [one.step_trace for one in all_running() if one.step_trace is not None]
    if len(paths) > 1:
        raise ConfigError(f"{len(paths)} engines write traces; name one: {', '.join(paths)}")
    if not paths and not os.path.exists(_USUAL_FILE):
        raise ConfigError(
            f"no engine of this user writes a trace, and there is no {_USUAL_FILE} here: name the "
            "FILE, or start an engine with --step-trace FILE"
        )
    return paths[0] if paths else _USUAL_FILE
