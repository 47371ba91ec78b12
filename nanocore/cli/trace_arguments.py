"""What `nanocore trace` and `nanocore explain` share: a parser, and how errors are told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from nanocore.system import standard_streams
from nanocore.tracing.step import TraceError

_USAGE_ERROR = 2


class TraceParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

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
