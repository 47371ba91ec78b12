"""What commands that have an engine share: what they need, their logs, and their exit codes.

Nothing heavy is imported before the flags are known to be right.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final, Protocol, TypeVar

from nanocore.cli.engine_choice import EngineChoice
from nanocore.protocol.errors import ConfigError, EngineStartError, NanocoreError, StartError
from nanocore.system import standard_streams
from nanocore.system.logs import complain

logger = logging.getLogger(__name__)

INTERRUPTED: Final = 130
_ENGINE_PACKAGES: Final = ("torch", "numpy", "safetensors", "huggingface_hub", "xxhash")


class _Options(Protocol):
    @property
    def engine(self) -> EngineChoice: ...


Options = TypeVar("Options", bound=_Options)


def run_command(name: str, parse: Callable[[], Options], work: Callable[[Options], int]) -> int:
    """The exit code of `work` with what `parse` returns; an error is one line on stderr.

    name: of the command, as it is typed.
    """
    standard_streams.open_missing()
    options = None
    try:
        options = parse()
        return work(options)
    except KeyboardInterrupt:  # before there is anything to end in order
        return INTERRUPTED
    except NanocoreError as error:
        text = re.sub(r"\b(start_)?timeout_s\b", "--start-timeout", str(error))
        exit_code = StartError.exit_code
        if isinstance(error, StartError):
            exit_code = error.exit_code
        elif isinstance(error, EngineStartError) and (error.exit_code or 0) > 0:
            exit_code = error.exit_code or exit_code
            hint = "" if options is None else options.engine.hint
            if hint and exit_code == ConfigError.exit_code:
                text += f"; {hint}"
        complain(f"{name}: {text}")
        return exit_code
    except BrokenPipeError:
        raise  # nobody reads what it prints
    except Exception:
        logger.exception("internal error")
        return StartError.exit_code
    finally:
        standard_streams.flush_or_drop()


def require(packages: Sequence[str], need: str, remedy: str) -> None:
    """Raises ConfigError unless they are installed."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise ConfigError(f"{need} {', '.join(missing)}: in the repository, {remedy}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package within one that is missing
        return False


def require_engine(engine: EngineChoice) -> None:
    """Raises ConfigError if one is to be launched, and what it needs is not installed."""
    if not engine.endpoints:
        require(
            _ENGINE_PACKAGES,
            "an engine needs",
            "pip install '.[engine,server]', or join an engine with --endpoint",
        )
