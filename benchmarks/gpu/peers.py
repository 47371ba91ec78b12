"""nano-vllm's benchmark: our engine alone, and beside others in alternating rounds.

Each engine's round is recorded as it ends. A peer that does not end one in its limit is said to
take longer than that; our rounds are kept.

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

from benchmarks.gpu import carry_vllm
from benchmarks.gpu.engine import engine_settings
from benchmarks.gpu.fa3 import FOLDER_VARIABLE
from benchmarks.gpu.results import Measurements, Results, Session, UnavailableError
from benchmarks.gpu.shapes import Model, models, rates
from benchmarks.models import write_config
from benchmarks.peer_process import NoAnswerError, PeerCommand, PeerProcess
from benchmarks.report import spread
from benchmarks.workloads import BenchmarkRequest, nano_vllm_workload

OURS: Final = "nanocore"
TEMPERATURE: Final = 0.6
_ROUNDS_S: Final = 100.0
"""After so long no other round is begun."""
_BENCHMARKS: Final = Path(__file__).resolve().parents[1]
STAND_INS: Final = Path(__file__).parent / "stand_ins"


NANO_VLLM: Final = "nano-vllm"
"""Also the folder of its carried source; it runs with our stand-in for flash_attn."""
VLLM: Final = "vllm"
"""Its package is carried, too, and the packages that it imports; see `carry_vllm`."""
INDUCTOR: Final = "vllm-inductor"
"""vLLM as it is by default: compiled by Inductor."""
DRIVERS: Final = {
    NANO_VLLM: ["nano_vllm_driver.py"],
    VLLM: ["vllm_driver.py"],
    INDUCTOR: ["vllm_driver.py", "--inductor"],
    "transformers": ["transformers_driver.py", "--batching", "continuous"],
}
"""Of each peer, with flags of its own."""


def measure(results: Results, part: str) -> None:
    """`bench`: ours, the smaller model; `bench-large`: the larger. `vllm`,
    `vllm-inductor`: beside ours, both models. Others: a peer beside ours, the smaller model.
    """
    needs_s = 40.0 if results.session.on_gpu else 1.0
    results.run(measurements(results, part), needs_s=needs_s, hangs_s=400)


def measurements(results: Results, part: str) -> Measurements:
    """By name."""
    small, large = models(results.session)
    both = [small, large]
    chosen = {"bench-large": [large], VLLM: both, INDUCTOR: both}.get(part, [small])
    return {f"{part}/{model.name}": partial(_measure, results, part, model) for model in chosen}


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
            begun_s = time.monotonic()
            engine = stack.enter_context(PeerProcess(command, Path(name) / f"{number}.log"))
            found = engine.wait_ready(session.remaining_s)
            ready[engine.name] = found | {"start_s": round(time.monotonic() - begun_s, 1)}
            print(f"{engine.name} is ready", flush=True)
            engines.append(engine)
        rounds = Rounds(results, part, model, engines)
        rounds.run()
    return rounds.figures(ready)


class Rounds:
    """Turns of engines at the same prompts; the order changes from round to round.

    walls_s: seconds by engine, an item for each round. too_slow: seconds that a peer did not end a
    round in, by its name.
    """

    def __init__(
        self, results: Results, part: str, model: Model, engines: list[PeerProcess]
    ) -> None:
        self._results, self._name, self._engines = results, f"{part}/{model.name}", engines
        self._model, self._small = model, results.session.small
        self._num_tokens = sum(r.num_output_tokens for r in self._requests(0))
        self._limit_s = model.workload_s(self._requests(0), rates(results))
        self.walls_s: dict[str, list[float]] = {engine.name: [] for engine in engines}
        self.too_slow: dict[str, float] = {}

    def run(self) -> None:
        """A short round to warm up, and then as many as the time allows, at most three."""
        for engine in self._engines:
            warm_up = [
                BenchmarkRequest(request.prompt_token_ids, min(8, request.num_output_tokens))
                for request in self._requests(-1)
            ]
            with engine.turn():
                engine.run(warm_up, max(1.0, self._results.session.remaining_s))
        start_s, longest_s = time.monotonic(), 0.0
        for number in range(2 if self._small else 3):
            left_s = start_s + _ROUNDS_S - time.monotonic()
            if number > 0 and min(self._results.session.remaining_s, left_s) < longest_s:
                break
            begun_s = time.monotonic()
            # Ours first, for a peer may take all the time that is left.
            for engine in self._engines[::-1] if number % 2 else self._engines:
                if engine.name not in self.too_slow:
                    self._take_turn(engine, number)
            longest_s = max(longest_s, time.monotonic() - begun_s)

    def _take_turn(self, engine: PeerProcess, number: int) -> None:
        requests = self._requests(number)
        limit_s = max(1.0, self._results.session.remaining_s)
        try:
            with engine.turn():
                wall_s = engine.run(requests, limit_s).wall_s
        except NoAnswerError:
            if engine.name == OURS:
                raise
            self.too_slow[engine.name] = limit_s
            figures = {"more_than_s": round(limit_s, 1)}
        else:
            self.walls_s[engine.name].append(wall_s)
            figures = {"wall_s": round(wall_s, 4),
                       "output_tokens_per_s": round(self._num_tokens / wall_s, 1)}  # fmt: skip
        self._results.add(f"{self._name}/{engine.name}/round {number}", figures=figures)

    def figures(self, ready: dict[str, Any]) -> dict[str, Any]:
        """Of all rounds. ready: what each engine says of itself."""
        found: dict[str, Any] = {
            name: {
                "wall_s": spread(values),
                "output_tokens_per_s": spread([self._num_tokens / s for s in values], 1),
                "share_of_limit": round(self._limit_s / median(values), 4),
                **ready[name],
            }
            for name, values in self.walls_s.items()
            if values
        }
        ours = self.walls_s[OURS]
        for name, values in self.walls_s.items():
            if name != OURS and values:
                ratios = [theirs / own for own, theirs in zip(ours, values, strict=False)]
                found["times_slower_than_ours"] = spread(ratios)
            if name in self.too_slow:
                found[name] = {**found.get(name, {}), "more_than_s": self.too_slow[name]}
        return found

    def _requests(self, repetition: int) -> list[BenchmarkRequest]:
        return nano_vllm_workload(self._model.shape.vocab_size, repetition, self._small)


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
        path = [_carried(session, name), STAND_INS]
    elif name in (VLLM, INDUCTOR):
        packages = _carried(session, carry_vllm.SITE)
        carry_vllm.join(packages.parent)
        path = [packages.parent, packages]
    limits = {"model-len": 4096, "num-seqs": 256, "num-batched-tokens": 16384}
    if session.small:
        limits = {"model-len": 256, "num-seqs": 8, "num-batched-tokens": 256}
    flags = [word for limit, value in limits.items() for word in (f"--max-{limit}", str(value))]
    flags += ["--device", session.device.type, "--memory-share", "0.44", "--random-weights"]
    command = _command(name, DRIVERS[name], folder, flags, path)
    command.environment[FOLDER_VARIABLE] = str(session.carried)
    return command


def _carried(session: Session, name: str) -> Path:
    if not session.carried or not (session.carried / name).exists():
        raise UnavailableError(f"not carried: {name}")
    return session.carried / name


def _command(
    name: str, driver: list[str], folder: Path, flags: list[str], path: list[Path]
) -> PeerCommand:
    common = ["--model", str(folder), "--temperature", str(TEMPERATURE)]
    script = str(_BENCHMARKS / "peers" / driver[0])
    command = [sys.executable, script, *driver[1:], *common, *flags]
    words = [*map(str, path), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    return PeerCommand(name, command, {"PYTHONPATH": os.pathsep.join(filter(None, words))})
