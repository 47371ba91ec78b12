"""`nanocore explain REQUEST [FILE]`: why a request took as long as it did, from a step trace."""

from __future__ import annotations

import sys

import msgspec

from nanocore.cli.trace_arguments import TraceParser, report_errors
from nanocore.system.standard_streams import harmless
from nanocore.tracing.explanation import explain
from nanocore.tracing.words import explanation_text


def run(arguments: list[str]) -> int:
    """Explain a request; returns the exit code."""
    return report_errors("nanocore explain", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = TraceParser(
        prog="nanocore explain",
        description="Say why a request waited, what it hit, who preempted it, and where its time "
        "to first token went.",
    )
    parser.add_argument("request", metavar="REQUEST", help="its id, as the client named it")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="steps.jsonl",
        help="of nanocore-engine --step-trace (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    explanation = explain(given.file, given.request)
    if given.json:
        sys.stdout.write(msgspec.json.encode(explanation).decode() + "\n")
    else:
        print(harmless(explanation_text(explanation)))
    return 0
