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
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Final, NoReturn, get_args

from nanocore import __version__
from nanocore.engine_core.config import (
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    SchedulingPolicy,
)
from nanocore.engine_core.process import standard_streams
from nanocore.engine_core.process.parent import ParentLink
from nanocore.protocol.endpoint import default_endpoint
from nanocore.protocol.errors import CacheMemoryError, ConfigError, StartError, memory_errors
from nanocore.worker.memory.host_memory import address_space_bytes, data_bytes
from nanocore.worker.messages import KVCacheDtype, LoadFormat, Quantization

_MIN_ADDRESS_SPACE_BYTES: Final = 900 * 10**6
_MIN_DATA_BYTES: Final = 360 * 10**6
"""Of libraries and threads, as measured with torch for CPUs alone; more is found out later."""

_EXIT_CODES = """\
exit codes: 0 clean, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error, 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a launching client hears of usage errors, too."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, and was given")
        raise ConfigError(f"{message} (nanocore-engine --help lists the flags)")


def build_parser() -> argparse.ArgumentParser:
    """The flags; their defaults are EngineConfig's."""
    parser = _Parser(
        prog="nanocore-engine",
        description="Serve one model over ZeroMQ. Clients connect with nanocore.client, or in any "
        "language by PROTOCOL.md.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"nanocore {__version__}")

    for add_flags in (
        _add_model_flags,
        _add_device_flags,
        _add_cache_flags,
        _add_scheduler_flags,
        _add_engine_flags,
        _add_event_flags,
    ):
        add_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", help="folder in Hugging Face format, or id on its hub (default: the demo model)"
    )
    model.add_argument("--revision", help="branch, tag or commit of the hub's model")
    model.add_argument(
        "--load-format", choices=get_args(LoadFormat), help="dummy: random weights, no files"
    )
    model.add_argument(
        "--dtype", choices=get_args(Dtype), help="default: the checkpoint's; float16 is for CUDA"
    )
    model.add_argument(
        "--max-model-len",
        type=_whole,
        help="tokens of prompt and output together; auto: what fits",
    )
    model.add_argument("--seed", type=_whole, help="for requests that bring no seed (default: 0)")


def _add_device_flags(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device and kernels")
    device.add_argument("--device", choices=get_args(Device), help="default: cuda where it is")
    device.add_argument("--attention-backend", choices=get_args(AttentionBackend))
    device.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="of weights as they are loaded; fp8, of activations too, is for CUDA (8.9 and above)",
    )
    device.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="the same logits, bit for bit, whatever else runs",
    )
    device.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="call kernels one by one, capture no graphs",
    )
    device.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="begin a step before the last one is done (default: on CUDA)",
    )
    device.add_argument(
        "--tensor-parallel-size", "-tp", "--tp", type=_whole, help="ranks that share each layer (1)"
    )
    device.add_argument(
        "--pipeline-parallel-size", "-pp", "--pp", type=_whole, help="stages of layers (1)"
    )
    device.add_argument(
        "--step-timeout-s", type=_real, help="a step that takes longer ends the engine (300)"
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=_whole, help="tokens per KV block (16; 64 on CUDA)")
    cache.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype))
    cache.add_argument(
        "--gpu-memory-utilization", type=_real, help="share of a GPU's memory to use (0.9)"
    )
    cache.add_argument(
        "--kv-cache-memory-bytes", type=_whole, help="of each rank, instead of a share"
    )
    cache.add_argument("--num-gpu-blocks-override", type=_whole, help="KV blocks, on any device")
    cache.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    cache.add_argument(
        "--salt-prefix-cache-by-session",
        action=argparse.BooleanOptionalAction,
        help="share cached prefixes only within a client's session",
    )


def _add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    scheduler = parser.add_argument_group("scheduler")
    scheduler.add_argument("--max-num-seqs", type=_whole, help="requests running at once (256)")
    scheduler.add_argument(
        "--max-num-batched-tokens", type=_whole, help="budget of a step (2048; 8192 on CUDA)"
    )
    scheduler.add_argument("--max-num-queued-reqs", type=_whole, help="more are refused (4096)")
    scheduler.add_argument("--max-num-queued-tokens", type=_whole, help="in prompts (4194304)")
    scheduler.add_argument("--scheduling-policy", choices=get_args(SchedulingPolicy))
    scheduler.add_argument(
        "--long-prefill-token-threshold", type=_whole, help="per prompt and step"
    )
    scheduler.add_argument(
        "--max-num-partial-prefills", type=_whole, help="prompts in chunks at once (0: no limit)"
    )
    scheduler.add_argument(
        "--watermark", type=_real, help="share of KV blocks that admission leaves free (0)"
    )
    scheduler.add_argument(
        "--target-itl-ms", type=_real, help="shrink prompt chunks so that decodes keep this (inf)"
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--listen", help=f"ipc:// or tcp:// endpoint (default: {default_endpoint()})"
    )
    engine.add_argument(
        "--curve-dir", metavar="DIR", help="keys for tcp://, made by nanocore-keygen"
    )
    engine.add_argument(
        "--max-num-clients", type=_whole, help="more are refused (1024, or what descriptors allow)"
    )
    engine.add_argument("--step-trace", metavar="FILE", help="append each step as a line of JSON")
    engine.add_argument(
        "--check", action="store_true", help="check flags, model files and memory, and exit"
    )
    engine.add_argument("--parent-fd", help=argparse.SUPPRESS)


def _add_event_flags(parser: argparse.ArgumentParser) -> None:
    events = parser.add_argument_group("KV cache events")
    events.add_argument("--kv-events-endpoint", help="ipc:// endpoint to publish them at")
    events.add_argument("--kv-events-replay-endpoint", help="ipc:// endpoint for missed ones")
    events.add_argument("--kv-events-topic", help="first frame of each batch (default: empty)")


def _whole(text: str) -> int | str:
    """The number; of what is none EngineConfig says what it should have been."""
    try:
        return int(text)
    except ValueError:
        return text


def _real(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def parse_config(arguments: list[str]) -> EngineConfig:
    """Flags to configuration.

    Raises:
        ConfigError: an unknown flag, or a value out of range.
    """
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}{_near_match(parser, unknown[0])}")
    values = vars(parsed)
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in values.items() if name in known})


def _near_match(parser: argparse.ArgumentParser, argument: str) -> str:
    """The flag that may have been meant."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = get_close_matches(argument.partition("=")[0], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _parent_link(arguments: list[str]) -> ParentLink | None:
    """The link to a launching client, found even when other flags are wrong.

    Raises:
        ConfigError: it is none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-fd")
    text = parser.parse_known_args(arguments)[0].parent_fd
    if text is None:
        return None
    try:
        return ParentLink(int(text))
    except (ValueError, OSError, OverflowError):
        raise ConfigError(
            f"--parent-fd {text}: not the number of a socket; this flag is for launching clients"
        ) from None


def _require_room() -> None:
    """Libraries that cannot be loaded whole, or start no thread, end the process without a word.

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
                f"{need_bytes / 1e6:.0f} MB beside its model: raise it"
            )


def _import_engine() -> Callable[[EngineConfig, ParentLink | None], int]:
    """`run_engine`, imported with the garbage collector off.

    What torch's import makes lives on. Walking it again and again is a sixth of that time.
    """
    gc.disable()
    try:
        from nanocore.engine_core.process.process import run_engine
    finally:
        gc.freeze()
        gc.enable()
    return run_engine


def _run(config: EngineConfig, parent: ParentLink | None) -> int:
    """Check or serve; these import torch, which takes seconds."""
    _require_room()
    if config.check:
        from nanocore.engine_core.process.check import check_engine

        check_engine(config)
        return 0
    return _import_engine()(config, parent)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run an engine until it is told to stop; exits with a code of the list in --help."""
    arguments = sys.argv[1:] if arguments is None else arguments
    standard_streams.open_missing()
    logging.basicConfig(
        level=logging.INFO,
        handlers=[standard_streams.LogHandler()],
        format=f"(engine pid={os.getpid()}) %(message)s",
    )
    parent = None
    try:
        with memory_errors(""):
            parent = _parent_link(arguments)
            exit_code = _run(parse_config(arguments), parent)
    except KeyboardInterrupt:  # before there is anything to end in order
        exit_code = 130
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}"
        cause = error if isinstance(error, StartError) else StartError(text)
        if parent is not None:
            parent.report_failure(cause)
        if cause is error:
            standard_streams.complain(f"nanocore-engine: {cause}")
        else:
            logging.exception("the engine failed to start")
        exit_code = cause.exit_code
    finally:
        standard_streams.flush_or_drop()
    logging.disable()  # what libraries have to say when the process ends
    sys.exit(exit_code)
