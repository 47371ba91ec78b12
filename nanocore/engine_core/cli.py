"""The `nanocore-engine` command: flags to an EngineConfig, and errors to exit codes.

Flags are spelled as `vllm serve` spells them. Nothing heavy is imported before the flags are known
to be right, so `--help` and a typo are answered at once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.flags import add_flags
from nanocore.engine_core.process.parent import ParentLink
from nanocore.protocol.errors import CacheMemoryError, ConfigError, StartError, memory_errors
from nanocore.system import standard_streams
from nanocore.system.flags import FlagParser, WholeFlagParser
from nanocore.system.large_stack_threads import join_threads
from nanocore.system.logs import complain, start_log
from nanocore.worker.memory.host_memory import address_space_bytes, data_bytes

if TYPE_CHECKING:
    from nanocore.engine_core.io.served_files import ServedFiles

_END_LIMIT_S: Final = 5.0
"""Time that threads of grammars have to end before the process ends without them."""
_MIN_ADDRESS_SPACE_BYTES: Final = 900 * 10**6
_MIN_DATA_BYTES: Final = 360 * 10**6
"""Need of libraries and threads, as measured with torch for CPUs; a larger need shows later."""

_EXIT_CODES = """\
exit codes: 0 clean, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error, 130 interrupted, 143 SIGTERM before it was ready"""


class _Parser(FlagParser):
    """A parser that raises instead of exiting: a launching client hears of usage errors, too."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, and was given")
        if message.startswith("argument --quantization: invalid choice"):
            message += "; how a checkpoint is quantized is found without this flag"
        if message.startswith("argument --dtype: invalid choice"):
            message += "; use auto: on a CPU a float16 checkpoint is bfloat16 then"
        super().error(message)


def build_parser() -> FlagParser:
    parser = _Parser(
        "nanocore-engine",
        "Serve one model over ZeroMQ. Clients connect with nanocore.client, or in any language by "
        "PROTOCOL.md.",
        epilog=_EXIT_CODES,
        has_engine=True,
    )
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--check",
        action="store_true",
        default=False,
        help="check flags, model files and memory, print what takes memory, and exit",
    )
    parser.add_argument("--parent-fd", help=argparse.SUPPRESS)
    add_flags(parser, EngineConfig)
    return parser


def parse_config(arguments: list[str]) -> EngineConfig:
    """Parse flags.

    Raises:
        ConfigError: an unknown flag, or a value out of range.
    """
    return _parse(arguments)[0]


def _parse(arguments: list[str]) -> tuple[EngineConfig, argparse.Namespace, tuple[str, ...]]:
    """Return the configuration, all flags, and what was done with flags of other engines."""
    parser = build_parser()
    parsed, unknown = parser.split(arguments)
    if unknown:
        parser.error(parser.unknown(unknown))
    known = {field.name for field in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in vars(parsed).items() if name in known})
    return config, parsed, parser.notices


def _early_value(arguments: list[str], name: str) -> str | None:
    """Return one flag's value before the others are checked; None if it has none."""
    parser = WholeFlagParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(name, dest="value")
    try:
        value: str | None = parser.parse_known_args(arguments)[0].value
    except argparse.ArgumentError:  # reported when all flags are parsed
        return None
    return value


def _parent_link(arguments: list[str]) -> ParentLink | None:
    """Open the link to a launching client, even when other flags are wrong.

    Raises:
        ConfigError: it is none.
    """
    text = _early_value(arguments, "--parent-fd")
    if text is None:
        return None
    try:
        return ParentLink(int(text))
    except (ValueError, OSError, OverflowError):
        raise ConfigError(
            f"--parent-fd {text}: not the number of a socket; this flag is for launching clients"
        ) from None


def _require_room() -> None:
    """Check limits of address space and data.

    Libraries that cannot be loaded whole, or start no thread, end the process without a message.

    Raises:
        CacheMemoryError: this process's limits leave no room for them.
    """
    for have_bytes, need_bytes, what in (
        (address_space_bytes(), _MIN_ADDRESS_SPACE_BYTES, "address space (ulimit -v)"),
        (data_bytes(), _MIN_DATA_BYTES, "data (ulimit -d)"),
    ):
        if have_bytes is not None and have_bytes < need_bytes:
            raise CacheMemoryError(
                f"out of memory: {have_bytes / 1e6:.0f} MB of {what} are left, and an engine needs "
                f"{need_bytes / 1e6:.0f} MB in addition to its model: raise it"
            )


@contextmanager
def _imports() -> Iterator[None]:
    """Import with the garbage collector off; say how to install a package that is missing.

    What torch's import makes lives on. Walking it again and again is a sixth of that time.
    """
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: to run an engine, `pip install '.[engine]'` first"
        ) from None
    finally:
        gc.freeze()
        gc.enable()


def _run(config: EngineConfig, flags: argparse.Namespace, parent: ParentLink | None) -> int:
    """Check or serve. Both import torch, which takes a second or more."""
    _require_room()
    if flags.check:
        with _imports():
            from nanocore.engine_core.process.check import check_engine

        check_engine(config)
        return 0
    with _imports():
        import numpy  # noqa: F401 - what is missing is told before a model is looked for
    files = _known_files(config, parent)
    with _imports():
        from nanocore.engine_core.process.process import run_engine

    return run_engine(config, parent, files)


def _known_files(config: EngineConfig, parent: ParentLink | None) -> ServedFiles | None:
    """Return the files of a model that needs no download, and report them.

    torch is imported later: a client that launched the engine makes its tokenizer meanwhile.
    """
    from nanocore.engine_core.io.served_files import read_files  # imports much
    from nanocore.worker.loading.model_folder import locate_model

    with suppress(StartError):  # raised in its place among a start's errors
        found = locate_model(config.model, config.revision) if config.model else demo_model_folder()
        if isinstance(found, Path):
            return read_files(found, parent)
    return None


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run an engine until it is told to stop. Exit codes are listed in --help."""
    arguments = sys.argv[1:] if arguments is None else arguments
    standard_streams.open_missing()
    # Errors in other flags are logged in this format, too.
    start_log("engine", "json" if _early_value(arguments, "--log-format") == "json" else "text")
    parent = None
    try:
        with memory_errors(""):
            parent = _parent_link(arguments)
            config, flags, notices = _parse(arguments)
            for notice in notices:
                logging.info("%s", notice)
            exit_code = _run(config, flags, parent)
    except KeyboardInterrupt:  # before there is anything to end in order
        exit_code = 130
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}"
        cause = error if isinstance(error, StartError) else StartError(text)
        if parent is not None:
            parent.report_failure(cause)
        if cause is not error:
            logging.exception("the engine failed to start")
        elif parent is None:  # else the launching client reports it
            complain(f"nanocore-engine: {cause}")
        exit_code = cause.exit_code
    finally:
        standard_streams.flush_or_drop()
    logging.disable()  # what libraries have to say when the process ends
    if not join_threads(_END_LIMIT_S):  # a grammar is compiled that nobody waits for
        os._exit(exit_code)
    sys.exit(exit_code)
