"""What `nanocore trace` and `nanocore explain` share: a parser, and how errors are told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from nanocore.system import standard_streams
from nanocore.tracing.step import TraceError

_USAGE_ERROR = 2
_EXIT_CODES = "exit codes: 0 done, 2 usage, or what cannot be read or is not there, 130 interrupted"


class TraceParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, epilog=_EXIT_CODES)

    def error(self, message: str) -> NoReturn:
        """Raises TraceError."""
        raise TraceError(f"{message} ({self.prog} --help says more)")


def report_errors(name: str, command: Callable[[], int]) -> int:
    """Run a command; its exit code, or 2 after an error in one line on stderr."""
    standard_streams.open_missing()
    try:
        return command()
    except TraceError as error:
        standard_streams.complain(f"{name}: {error}")
        return _USAGE_ERROR
    finally:
        standard_streams.flush_or_drop()
