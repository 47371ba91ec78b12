"""`nanocore trace FILE`: what a step trace says, in numbers, and as a picture for Perfetto."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import msgspec

from nanocore.cli.trace_arguments import TraceParser, report_errors
from nanocore.system.standard_streams import harmless
from nanocore.tracing.perfetto import PerfettoWriter
from nanocore.tracing.reader import TraceReader
from nanocore.tracing.run import Run
from nanocore.tracing.step import TraceError
from nanocore.tracing.summary import RunSummary, Tally, summarize
from nanocore.tracing.words import summary_text


class Summary(msgspec.Struct):
    """What `--json` prints. num_cut_lines: that an engine left unfinished."""

    file: str
    num_cut_lines: int
    runs: list[RunSummary]


def run(arguments: list[str]) -> int:
    """Summarize a trace; returns the exit code."""
    return report_errors("nanocore trace", lambda: _run(arguments))


def read_trace(path: str, perfetto: str | None = None) -> Summary:
    """Read a trace once, and draw it if asked for.

    Raises:
        TraceError: it is none, holds no step, or the picture cannot be written.
    """
    reader = TraceReader(path)
    runs: list[RunSummary] = []
    with ExitStack() as stack:
        writer = None
        if perfetto is not None:
            writer = PerfettoWriter(stack.enter_context(_picture(perfetto, path)))
        current, tally = Run(1), Tally()

        def end_run() -> None:
            current.settle()
            runs.append(summarize(current, tally))
            if writer is not None:
                writer.end_run(current)

        for number, step in reader:
            if number != current.number:
                end_run()
                current, tally = Run(number), Tally()
            current.add(step)
            tally.add(step, current.num_tokens)
            if writer is not None:
                writer.step(current, step)
        if not current.steps:
            raise TraceError(f"{path} holds no step; was the engine asked anything?")
        end_run()
        if writer is not None:
            writer.close()
    return Summary(path, reader.num_cut_lines, runs)


def _run(arguments: list[str]) -> int:
    parser = TraceParser(
        prog="nanocore trace",
        description="Summarize a step trace, as nanocore-engine --step-trace writes it.",
    )
    parser.add_argument("file", metavar="FILE", help="the trace; it may still be written")
    parser.add_argument(
        "--perfetto", metavar="OUT", help="write Chrome trace events, for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    summary = read_trace(given.file, given.perfetto)
    if given.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        return 0
    for one in summary.runs:
        print(harmless(summary_text(one)))
    if summary.num_cut_lines:
        print(f"{summary.num_cut_lines} unfinished lines were left out")
    if given.perfetto:
        print(f"{given.perfetto} is written: open it at https://ui.perfetto.dev")
    return 0


@contextmanager
def _picture(path: str, trace: str) -> Iterator[BinaryIO]:
    """The file to draw into; what goes wrong with it, then or later, is told of it."""
    if os.path.exists(path) and os.path.exists(trace) and os.path.samefile(path, trace):
        raise TraceError(f"--perfetto {path} is the trace itself; name another file")
    try:
        with open(path, "wb") as file:
            yield file
    except OSError as error:
        raise TraceError(
            f"--perfetto {path}: {error.strerror}; name a file that can be written"
        ) from None
