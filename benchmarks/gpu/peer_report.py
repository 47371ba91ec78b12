"""Our engine beside others on nano-vllm's benchmark, in pairs, in alternating rounds.

Of each pair both engines are loaded, with half of the memory each, and take turns with the same
prompts; the order changes from round to round, and the ratio is made within a round. An engine that
was not carried is recorded as that. Weights are random everywhere: the temperature is above 0 and
EOS is ignored, so all have the same work.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.gpu.engine import graph_settings
from benchmarks.gpu.run import ROOT, child_environment
from benchmarks.gpu.session import LackingError, Results, Session, say
from benchmarks.gpu.shapes import MODELS, Model, models, rates
from benchmarks.gpu.workload import Workload, nano_vllm_workload
from benchmarks.machine import spread
from benchmarks.peer_process import PeerCommand, PeerProcess
from benchmarks.workloads import BenchmarkRequest

OURS: Final = "nanocore"
MEMORY_SHARE: Final = 0.44
"""Of the card, for each engine of a pair."""
_ROUNDS_S: Final = 120.0
"""After so long no other round of a pair is begun."""
_STAND_INS: Final = ROOT / "benchmarks" / "gpu" / "stand_ins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine to compare with.

    module: its driver. carried: what must be in the folder of carried things; the folders among
    these are put on its path. arguments: flags of its driver. stand_ins: folder of packages of
    ours that take the place of what it imports and the machine lacks.
    """

    name: str
    module: str
    carried: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    stand_ins: str | None = None
    models: tuple[str, ...] = tuple(MODELS)


PEERS: Final = (
    Peer(name="vllm, FA3", module="vllm_driver", carried=("vllm-site/vllm",), stand_ins="vllm",
         arguments=("--attention", "FLASH_ATTN")),
    Peer(name="nano-vllm, FA3", module="nano_vllm_driver", carried=("nano-vllm", "fa3.so.xz"),
         arguments=("--attention", "fa3"), stand_ins="nano_vllm"),
    Peer(name="transformers, sdpa", module="transformers_driver",
         arguments=("--attention", "paged|sdpa"), models=("qwen3-0.6b",)),
)  # fmt: skip


def measure(session: Session) -> None:
    """Each peer with each model."""
    results = Results(session, "peers", needs_s=90.0 if session.on_gpu else 1.0, hangs_s=400.0)
    results.data["rates_measured"] = rates(session).measured
    results.run({name: partial(_compare, session, *pair) for name, pair in pairs(session).items()})


def pairs(session: Session) -> dict[str, tuple[Peer, Model]]:
    """What is compared, by name."""
    return {
        f"{peer.name}/{model.name}": (peer, model)
        for peer in PEERS
        for model in models(session).values()
        if session.small or model.name in peer.models
    }


def _compare(session: Session, peer: Peer, model: Model) -> dict[str, Any]:
    """Start both, warm up, and take turns as long as the time allows."""
    missing = [part for part in peer.carried if session.carried_path(part) is None]
    if missing:
        raise LackingError(f"not carried: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as name:
        folder, logs = model.write_folder(Path(name)), Path(name)
        ours = Peer(name=OURS, module="nanocore_driver")
        ready, engines = {}, []
        with ExitStack() as stack:
            # One after the other: each sizes its KV cache by the memory that it finds.
            for engine in (ours, peer):
                log = logs / f"{len(engines)}.log"
                process = stack.enter_context(_start(session, engine, folder, log))
                ready[engine.name] = process.wait_ready(session.remaining_s)
                say(f"{engine.name} is ready")
                engines.append(process)
            rounds = _take_turns(session, model, engines)
    return _summarize(session, model, rounds, ready, peer.name)


def _start(session: Session, peer: Peer, folder: Path, log: Path) -> PeerProcess:
    path = [
        found
        for part in peer.carried
        if (found := session.carried_path(part.partition("/")[0])) and found.is_dir()
    ]
    if peer.stand_ins:
        path.append(_STAND_INS / peer.stand_ins)
    arguments = [
        "--model", str(folder), "--device", session.device.type,
        "--memory-share", str(MEMORY_SHARE), *peer.arguments,
    ]  # fmt: skip
    arguments += ["--small"] if session.small else []
    arguments += ["--enforce-eager"] if graph_settings(session) else []
    arguments += ["--carried", str(session.carried)] if session.carried else []
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", f"benchmarks.gpu.peers.{peer.module}", *arguments]
    return PeerProcess(PeerCommand(peer.name, command, environment), log)


def _take_turns(
    session: Session, model: Model, engines: list[PeerProcess]
) -> dict[str, list[float]]:
    """Seconds by engine, one for each round that both have done; a short one warms up."""
    walls_s: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        warm_up = nano_vllm_workload(model.shape.vocab_size, -1, session.small)
        warm_up = Workload(warm_up.prompts, [min(8, count) for count in warm_up.num_outputs])
        engine.run(_requests(warm_up), max(1.0, session.remaining_s))
    start_s, longest_s = time.monotonic(), 0.0
    for repetition in range(2 if session.small else 3):
        left_s = min(session.remaining_s, start_s + _ROUNDS_S - time.monotonic())
        if repetition > 0 and left_s < longest_s:
            break
        workload = nano_vllm_workload(model.shape.vocab_size, repetition, session.small)
        taken = {}
        for engine in engines if repetition % 2 else engines[::-1]:
            limit_s = max(1.0, session.remaining_s)
            taken[engine.name] = engine.run(_requests(workload), limit_s).wall_s
            say(f"round {repetition}, {engine.name}: {taken[engine.name]:.2f} s")
        longest_s = max(longest_s, sum(taken.values()))
        for name, wall_s in taken.items():
            walls_s[name].append(wall_s)
    return walls_s


def _requests(workload: Workload) -> list[BenchmarkRequest]:
    pairs = zip(workload.prompts, workload.num_outputs, strict=True)
    return [BenchmarkRequest(tuple(prompt), count) for prompt, count in pairs]


def _summarize(
    session: Session,
    model: Model,
    walls_s: dict[str, list[float]],
    ready: dict[str, Any],
    peer: str,
) -> dict[str, Any]:
    workload = nano_vllm_workload(model.shape.vocab_size, 0, session.small)
    limit_s = model.workload_s(workload.sizes, rates(session))
    num_tokens = workload.num_output_tokens
    engines = {
        name: {
            "wall_s": spread([round(wall_s, 4) for wall_s in values]),
            "output_tokens_per_s": spread([round(num_tokens / wall_s, 1) for wall_s in values]),
            "share_of_limit": round(limit_s / median(values), 4),
            **ready[name],
        }
        for name, values in walls_s.items()
    }
    ratios = [round(b / a, 4) for a, b in zip(walls_s[OURS], walls_s[peer], strict=True)]
    return {"times_slower_than_ours": spread(ratios), "engines": engines}
