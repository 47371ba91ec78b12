"""`nanocore batch`: from the command line to results, and from errors to exit codes."""

from __future__ import annotations

from functools import partial

from nanocore.cli.batch.flags import BatchOptions, parse
from nanocore.cli.command import require, require_engine, run_command
from nanocore.system.logs import start_log


def run(arguments: list[str]) -> int:
    """Answer all lines; returns the exit code."""
    return run_command("nanocore batch", partial(parse, arguments), _batch)


def _batch(options: BatchOptions) -> int:
    require(("prometheus_client",), "a batch needs", "pip install '.[server]'")
    require_engine(options.engine)
    start_log("batch")
    from nanocore.cli.batch.session import answer_batch

    return answer_batch(options)
