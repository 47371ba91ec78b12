"""Common parts of all commands: exit codes, errors in one line, and checks for packages.

Nothing heavy is imported before the flags are known to be valid.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

from nanocore.cli.engine_choice import EngineChoice
from nanocore.protocol.errors import (
    ConfigError,
    EngineStartError,
    ModelFileError,
    NanocoreError,
    StartError,
)
from nanocore.system import standard_streams
from nanocore.system.logs import complain

logger = logging.getLogger(__name__)

INTERRUPTED: Final = 130
_OF_OUTPUT: Final = (errno.EPIPE, errno.ENOSPC, errno.EIO)
"""Errors of a standard output without a reader, on a full disk, or of a closed terminal."""
_ENGINE_PACKAGES: Final = ("torch", "numpy", "safetensors", "huggingface_hub", "xxhash")


def run_command(name: str, work: Callable[[], int], timeout_flag: str = "--timeout") -> int:
    """Return the exit code of `work`, or that of an error: one line on stderr, or a traceback.

    name: of the command, as typed. timeout_flag: replaces `timeout_s` in errors of the client.
    """
    standard_streams.open_missing()
    try:
        return work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except NanocoreError as error:
        text = re.sub(r"\b(start_)?timeout_s\b", timeout_flag, str(error))
        text = re.sub(r"\bcurve_dir\b", "--curve-dir", text)
        complain(f"{name}: {text}")
        return _exit_code(error)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_OUTPUT:
            raise  # `main` reports it
        logger.exception("internal error")
        return StartError.exit_code
    finally:
        standard_streams.flush_or_drop()


def _exit_code(error: NanocoreError) -> int:
    if isinstance(error, StartError):
        return error.exit_code
    if isinstance(error, EngineStartError) and (error.exit_code or 0) > 0:
        return error.exit_code or StartError.exit_code
    return ConfigError.exit_code if isinstance(error, ValueError) else StartError.exit_code


def require(packages: Sequence[str], need: str, remedy: str) -> None:
    """Raise ConfigError unless all packages are installed."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise ConfigError(f"{need} {', '.join(missing)}: in the repository, {remedy}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def require_engine(engine: EngineChoice) -> None:
    """Raise an error if an engine is to be launched that lacks packages, its model, or refuses its
    flags.

    The engine would refuse them itself, but only after this command has said that it starts. If an
    engine was found that no flag names, say which.

    Raises:
        ConfigError: packages or flags. ModelFileError: there is no such model on this machine, and
        it is none of the hub.
    """
    if engine.found is not None:
        complain(f"joining the {engine.found}")
    if engine.endpoints:
        return
    require(
        _ENGINE_PACKAGES,
        "an engine needs",
        "pip install '.[engine,server]', or join an engine with --endpoint",
    )
    from nanocore.engine_core.cli import parse_config
    from nanocore.worker.loading.model_folder import locate_model

    try:
        config = parse_config(list(engine.flags))
        if config.model is not None:
            locate_model(config.model, config.revision)
    except ConfigError as error:
        more = filter(None, (engine.hint, *engine.notices))
        raise ConfigError("; ".join((str(error), *more))) from None
    except ModelFileError as error:  # the user may have given it without a flag
        raise ModelFileError(f"model {str(error).removeprefix('--model ')}") from None
