"""Commands that only look at an engine that runs: which one, and what it tells of itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import ConfigError, NanocoreError, StartError
from nanocore.system import standard_streams

JOIN_TIMEOUT_S = 10.0


class ReaderParser(argparse.ArgumentParser):
    """Says what is wrong in one line. Has the flags that name an engine."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("--endpoint", metavar="ENDPOINT",
            help="of the engine, ipc:// or tcp:// (default: this user's own)")  # fmt: skip
        self.add_argument("--curve-dir", metavar="DIR", help="keys of nanocore-keygen, for tcp://")

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message} ({self.prog} --help lists the flags)")


def join(given: argparse.Namespace, resume: bool = True) -> AsyncEngineClient:
    """A client of the engine that the flags name; not yet connected."""
    return AsyncEngineClient.connect(
        given.endpoint, timeout_s=JOIN_TIMEOUT_S, curve_dir=given.curve_dir, resume=resume
    )


def report_errors(name: str, command: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of the error that is told in one line on stderr."""
    standard_streams.open_missing()
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except NanocoreError as error:
        standard_streams.complain(f"{name}: {error}")
        return error.exit_code if isinstance(error, StartError) else StartError.exit_code
    finally:
        standard_streams.flush_or_drop()
