"""Which engines compare.py runs, and how each driver is started.

An engine is a driver in peers/ that speaks its line protocol, with the interpreter or binary it
needs. What is missing is an error with the remedy, before anything is started.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from peer_process import PeerCommand, PeerError

_BENCHMARKS: Final = Path(__file__).resolve().parent
_DRIVERS: Final = _BENCHMARKS / "peers"
_REMEDY: Final = 'Set it up as benchmarks/README.md says under "Beside other engines".'
OURS: Final = "nanocore"
PEERS: Final = ("vllm-cpu", "llama.cpp", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose engines."""
    parser.add_argument("--peers", default="", metavar="A,B", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--vllm-python", metavar="PATH", default=os.environ.get("VLLM_PYTHON"),
                        help="interpreter that has vLLM (or $VLLM_PYTHON)")  # fmt: skip
    parser.add_argument("--llama-server", metavar="PATH", default=os.environ.get("LLAMA_SERVER"),
                        help="its binary (or $LLAMA_SERVER)")  # fmt: skip
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS",
                        help="our engine a second time, with more flags")  # fmt: skip
    parser.add_argument("--driver", action="append", default=[], metavar="NAME=COMMAND",
                        help="another engine, by a driver of yours (see peers/)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="of every engine (default: one per core)")  # fmt: skip
    parser.add_argument("--max-model-len", type=int, default=2048, help="of ours and of vLLM")
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="of ours and of vLLM")


def engine_commands(
    arguments: argparse.Namespace, model: Path, engine_flags: list[str]
) -> list[PeerCommand]:
    """Ours, its variants, and the peers, in this order.

    Raises:
        PeerError: a peer is unknown, or its interpreter or binary is not there.
    """
    ours = [(OURS, engine_flags)]
    for text in arguments.variant:
        name, flags = _named("--variant", text)
        ours.append((name, [*engine_flags, *shlex.split(flags)]))
    commands = [_our_command(arguments, model, name, flags) for name, flags in ours]
    peers = filter(None, arguments.peers.split(","))
    commands += [_peer_command(arguments, peer, model) for peer in peers]
    for text in arguments.driver:
        name, command = _named("--driver", text)
        commands.append(PeerCommand(name, shlex.split(command)))
    names = [command.name for command in commands]
    if len(set(names)) < len(names):
        raise PeerError(f"engines {', '.join(names)}: each needs a name of its own")
    return commands


def _our_command(
    arguments: argparse.Namespace, model: Path, name: str, flags: list[str]
) -> PeerCommand:
    path = os.pathsep.join(filter(None, [str(_BENCHMARKS), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable, str(_DRIVERS / "nanocore_driver.py"), "--model", str(model),
        "--max-model-len", str(arguments.max_model_len),
        "--kv-cache-memory-bytes", str(arguments.kv_cache_gib * 2**30), *flags,
    ]  # fmt: skip
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(arguments.threads)}
    return PeerCommand(name, command, environment)


def _peer_command(arguments: argparse.Namespace, peer: str, model: Path) -> PeerCommand:
    common = ["--model", str(model), "--threads", str(arguments.threads)]
    environment = {"PYTHONPATH": "", "OMP_NUM_THREADS": str(arguments.threads)}
    match peer:
        case "vllm-cpu":
            python = _executable("--vllm-python", arguments.vllm_python)
            command = [
                python, str(_DRIVERS / "vllm_driver.py"), *common,
                "--max-model-len", str(arguments.max_model_len),
                "--kv-cache-gib", str(arguments.kv_cache_gib),
            ]  # fmt: skip
            return PeerCommand(peer, command, environment, _REMEDY)
        case "llama.cpp":
            server = _executable("--llama-server", arguments.llama_server)
            driver = [sys.executable, str(_DRIVERS / "llama_cpp_driver.py"), "--server", server]
            # our own path: the model file is written with a package of this interpreter
            return PeerCommand(f"{peer} bf16", [*driver, *common], remedy=_REMEDY)
        case "transformers":
            command = [sys.executable, str(_DRIVERS / "transformers_driver.py"), *common]
            return PeerCommand(peer, command, environment, _REMEDY)
    raise PeerError(f"--peers {peer}: unknown; choose from {', '.join(PEERS)}")


def _executable(flag: str, path: str | None) -> str:
    if path is None:
        raise PeerError(f"{flag} is missing. {_REMEDY}")
    found = shutil.which(path)
    if found is None:
        raise PeerError(f"{flag} {path}: not an executable file. {_REMEDY}")
    return str(Path(found).absolute())  # not resolved: an environment's python is a link


def _named(flag: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise PeerError(f"{flag} {text}: write NAME=VALUE")
    return name, value
