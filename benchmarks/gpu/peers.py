"""nano-vllm's benchmark: our engine alone, and beside others in alternating rounds.

Of each pair both engines are loaded, with half of the memory each, and take turns with the same
prompts; the order changes from round to round, and the ratio is made within a round. Weights are
random everywhere: the temperature is above 0 and EOS is ignored, so all have the same work. Engines
run behind the drivers of benchmarks/peers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.gpu.engine import engine_settings
from benchmarks.gpu.fa3 import FOLDER_VARIABLE
from benchmarks.gpu.results import Measurements, Results, UnavailableError
from benchmarks.gpu.shapes import Model, models, rates
from benchmarks.models import write_config
from benchmarks.peer_process import PeerCommand, PeerProcess
from benchmarks.report import spread
from benchmarks.workloads import BenchmarkRequest, nano_vllm_workload

OURS: Final = "nanocore"
TEMPERATURE: Final = 0.6
_ROUNDS_S: Final = 100.0
"""After so long no other round is begun."""
_BENCHMARKS: Final = Path(__file__).resolve().parents[1]
_STAND_INS: Final = Path(__file__).parent / "stand_ins"


NANO_VLLM: Final = "nano-vllm"
"""Also the folder of its carried source; it runs with our stand-in for flash_attn."""
DRIVERS: Final = {
    NANO_VLLM: ["nano_vllm_driver.py"],
    "transformers": ["transformers_driver.py", "--batching", "continuous"],
}
"""Of each peer, with flags of its own."""


def measure(results: Results, part: str) -> None:
    """`bench`: ours with each model. Others: a peer beside ours, with the smaller one."""
    needs_s = 40.0 if results.session.on_gpu else 1.0
    results.run(measurements(results, part), needs_s=needs_s, hangs_s=400)


def measurements(results: Results, part: str) -> Measurements:
    """By name."""
    found = models(results.session)
    measured = found if part == "bench" else found[:1]
    return {f"{part}/{model.name}": partial(_measure, results, part, model) for model in measured}


def _measure(results: Results, part: str, model: Model) -> dict[str, Any]:
    """Start the engines, warm up, and take turns as long as the time allows."""
    session, has_peer = results.session, part in DRIVERS
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as name, ExitStack() as stack:
        folder = Path(name, model.name)
        write_config(model.shape, folder)
        commands = [_our_command(results, folder, 0.44 if has_peer else 0.9)]
        commands += [_peer_command(results, part, folder)] if has_peer else []
        ready, engines = {}, []
        # One after the other: each sizes its KV cache by the memory that it finds.
        for number, command in enumerate(commands):
            engine = stack.enter_context(PeerProcess(command, Path(name) / f"{number}.log"))
            ready[engine.name] = engine.wait_ready(session.remaining_s)
            print(f"{engine.name} is ready", flush=True)
            engines.append(engine)
        walls_s = _take_turns(results, model, engines)
    requests = nano_vllm_workload(model.shape.vocab_size, 0, session.small)
    limit_s = model.workload_s(requests, rates(results))
    num_tokens = sum(request.num_output_tokens for request in requests)
    figures: dict[str, Any] = {
        name: {
            "wall_s": spread(values),
            "output_tokens_per_s": spread([num_tokens / wall_s for wall_s in values], 1),
            "share_of_limit": round(limit_s / median(values), 4),
            **ready[name],
        }
        for name, values in walls_s.items()
    }
    if has_peer:
        ratios = [b / a for a, b in zip(walls_s[OURS], walls_s[part], strict=True)]
        figures["times_slower_than_ours"] = spread(ratios)
    return figures


def _take_turns(
    results: Results, model: Model, engines: list[PeerProcess]
) -> dict[str, list[float]]:
    """Seconds by engine, one for each round that all have done; a short one warms up."""
    session, vocab_size = results.session, model.shape.vocab_size
    walls_s: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        warm_up = [
            BenchmarkRequest(request.prompt_token_ids, min(8, request.num_output_tokens))
            for request in nano_vllm_workload(vocab_size, -1, session.small)
        ]
        with engine.turn():
            engine.run(warm_up, max(1.0, session.remaining_s))
    start_s, longest_s = time.monotonic(), 0.0
    for repetition in range(2 if session.small else 3):
        left_s = min(session.remaining_s, start_s + _ROUNDS_S - time.monotonic())
        if repetition > 0 and left_s < longest_s:
            break
        requests, taken = nano_vllm_workload(vocab_size, repetition, session.small), {}
        for engine in engines if repetition % 2 else engines[::-1]:
            with engine.turn():
                taken[engine.name] = engine.run(requests, max(1.0, session.remaining_s)).wall_s
            print(f"round {repetition}, {engine.name}: {taken[engine.name]:.2f} s", flush=True)
        longest_s = max(longest_s, sum(taken.values()))
        for name, wall_s in taken.items():
            walls_s[name].append(wall_s)
    return walls_s


def _our_command(results: Results, folder: Path, memory_share: float) -> PeerCommand:
    settings = engine_settings(results) | {"load_format": "dummy"}
    if results.session.on_gpu:
        settings["gpu_memory_utilization"] = memory_share
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return _command(OURS, ["nanocore_driver.py"], folder, flags, [])


def _peer_command(results: Results, name: str, folder: Path) -> PeerCommand:
    """Raises UnavailableError if it was not carried."""
    session, path = results.session, list[Path]()
    if name == NANO_VLLM:
        if not session.carried or not (session.carried / name).exists():
            raise UnavailableError(f"not carried: {name}")
        path = [session.carried / name, _STAND_INS]
    limits = {"model-len": 4096, "num-seqs": 256, "num-batched-tokens": 16384}
    if session.small:
        limits = {"model-len": 256, "num-seqs": 8, "num-batched-tokens": 256}
    flags = [word for limit, value in limits.items() for word in (f"--max-{limit}", str(value))]
    flags += ["--device", session.device.type, "--memory-share", "0.44", "--random-weights"]
    command = _command(name, DRIVERS[name], folder, flags, path)
    command.environment[FOLDER_VARIABLE] = str(session.carried)
    return command


def _command(
    name: str, driver: list[str], folder: Path, flags: list[str], path: list[Path]
) -> PeerCommand:
    common = ["--model", str(folder), "--temperature", str(TEMPERATURE)]
    script = str(_BENCHMARKS / "peers" / driver[0])
    command = [sys.executable, script, *driver[1:], *common, *flags]
    words = [*map(str, path), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    return PeerCommand(name, command, {"PYTHONPATH": os.pathsep.join(filter(None, words))})
