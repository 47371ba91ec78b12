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
from typing import NoReturn, get_args

from nanocore import __version__
from nanocore.engine_core.config import (
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    SchedulingPolicy,
)
from nanocore.engine_core.parent import ParentLink
from nanocore.protocol.endpoint import default_endpoint
from nanocore.protocol.errors import ConfigError, StartError
from nanocore.protocol.worker import KVCacheDtype, LoadFormat, Quantization

_EXIT_CODES = """\
exit codes: 0 clean, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error, 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a launching client hears of usage errors, too."""

    def error(self, message: str) -> NoReturn:
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
    model.add_argument("--dtype", choices=get_args(Dtype), help="default: the checkpoint's")
    model.add_argument(
        "--max-model-len",
        type=_length,
        help="tokens of prompt and output together; auto: what fits",
    )
    model.add_argument("--seed", type=int, help="for requests that bring no seed (default: 0)")


def _add_device_flags(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device and kernels")
    device.add_argument("--device", choices=get_args(Device), help="default: cuda where it is")
    device.add_argument("--attention-backend", choices=get_args(AttentionBackend))
    device.add_argument("--quantization", choices=get_args(Quantization))
    device.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same logits, bit for bit, whatever else runs",
    )
    device.add_argument(
        "--enforce-eager", action="store_true", help="call kernels one by one, capture no graphs"
    )
    device.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="begin a step before the last one is done (default: on CUDA)",
    )
    device.add_argument(
        "--tensor-parallel-size", "-tp", "--tp", type=int, help="ranks that share each layer (1)"
    )
    device.add_argument(
        "--pipeline-parallel-size", "-pp", "--pp", type=int, help="stages of layers (1)"
    )
    device.add_argument(
        "--step-timeout-s", type=float, help="then the rank that hangs is named (300)"
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=int, help="tokens per KV block (16; 64 on CUDA)")
    cache.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype))
    cache.add_argument(
        "--gpu-memory-utilization", type=float, help="share of a GPU's memory to use (0.9)"
    )
    cache.add_argument("--kv-cache-memory-bytes", type=int, help="of each rank, instead of a share")
    cache.add_argument("--num-gpu-blocks-override", type=int, help="KV blocks, on any device")
    cache.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    cache.add_argument(
        "--salt-prefix-cache-by-session",
        action="store_true",
        help="share cached prefixes only within a client's session",
    )


def _add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    scheduler = parser.add_argument_group("scheduler")
    scheduler.add_argument("--max-num-seqs", type=int, help="requests running at once (256)")
    scheduler.add_argument(
        "--max-num-batched-tokens", type=int, help="budget of a step (2048; 8192 on CUDA)"
    )
    scheduler.add_argument("--max-num-queued-reqs", type=int, help="more are refused (4096)")
    scheduler.add_argument("--max-num-queued-tokens", type=int, help="in prompts (4194304)")
    scheduler.add_argument("--scheduling-policy", choices=get_args(SchedulingPolicy))
    scheduler.add_argument("--long-prefill-token-threshold", type=int, help="per prompt and step")
    scheduler.add_argument(
        "--max-num-partial-prefills", type=int, help="prompts in chunks at once (0: no limit)"
    )
    scheduler.add_argument(
        "--watermark", type=float, help="share of KV blocks that admission leaves free (0)"
    )
    scheduler.add_argument(
        "--target-itl-ms", type=float, help="shrink prompt chunks so that decodes keep this (inf)"
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
        "--max-num-clients", type=int, help="more are refused (1024, or what descriptors allow)"
    )
    engine.add_argument("--step-trace", metavar="FILE", help="append each step as a line of JSON")
    engine.add_argument(
        "--check", action="store_true", help="check flags, model files and memory, and exit"
    )
    engine.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)


def _add_event_flags(parser: argparse.ArgumentParser) -> None:
    events = parser.add_argument_group("KV cache events")
    events.add_argument("--kv-events-endpoint", help="ipc:// endpoint to publish them at")
    events.add_argument("--kv-events-replay-endpoint", help="ipc:// endpoint for missed ones")
    events.add_argument("--kv-events-topic", help="first frame of each batch (default: empty)")


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse_config(arguments: list[str]) -> EngineConfig:
    """Flags to configuration.

    Raises:
        ConfigError: an unknown flag, or a value out of range.
    """
    values = vars(build_parser().parse_args(arguments))
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in values.items() if name in known})


def _parent_link(arguments: list[str]) -> ParentLink | None:
    """The link to a launching client, found even when other flags are wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-fd", type=int)
    parent_fd = parser.parse_known_args(arguments)[0].parent_fd
    return None if parent_fd is None else ParentLink(parent_fd)


def _import_engine() -> Callable[[EngineConfig, ParentLink | None], int]:
    """`run_engine`, imported with the garbage collector off.

    What torch's import makes lives on. Walking it again and again is a sixth of that time.
    """
    gc.disable()
    try:
        from nanocore.engine_core.process import run_engine
    finally:
        gc.freeze()
        gc.enable()
    return run_engine


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run an engine until it is told to stop; exits with a code of the list in --help."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"(engine pid={os.getpid()}) %(message)s",
    )
    parent = _parent_link(arguments)
    try:
        config = parse_config(arguments)
        # These import torch: seconds.
        if config.check:
            from nanocore.engine_core.check import check_engine

            check_engine(config)
            exit_code = 0
        else:
            exit_code = _import_engine()(config, parent)
    except Exception as error:
        if isinstance(error, StartError):
            cause = error
            print(f"nanocore-engine: {cause}", file=sys.stderr)
        else:
            logging.exception("the engine failed to start")
            cause = StartError(f"internal error: {type(error).__name__}: {error}")
        if parent is not None:
            parent.report_failure(cause)
        exit_code = cause.exit_code
    sys.exit(exit_code)
