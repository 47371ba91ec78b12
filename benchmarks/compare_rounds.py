"""Rounds of a comparison: every engine's turn at a workload, and turns that were too noisy.

A turn is noisy if the memory beside it was slower or faster than beside the round's others, or if
the CPU was taken by something else; it is run again, within a limit, and what it said is kept
apart. A retry has prompts of its own, for no engine may find them in its prefix cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from noise import Noise, NoiseMeter
from peer_process import PeerProcess, PeerRun
from workloads import WORKLOAD_NAMES, BenchmarkRequest, Workload, make_workload

_MAX_CANARY_DIFFERENCE: Final = 0.15
_MAX_FOREIGN_SHARE: Final = 0.1
_RETRY_STRIDE: Final = 1000  # repetitions apart, more than anyone asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine's run of a workload, and how quiet the machine was beside it.

    repetition: which prompts. noisy: the canary is not the round's, or too much of the CPU went to
    others.
    """

    repetition: int
    run: PeerRun
    noise: Noise
    noisy: bool = False


class Comparison:
    """Rounds of turns. Keeps the turns that count and the noisy ones that were run again."""

    def __init__(self, engines: Sequence[PeerProcess], vocab_size: int, max_retries: int) -> None:
        self._engines = engines
        self._vocab_size = vocab_size
        self._max_retries = max_retries
        self._meter = NoiseMeter()
        self.turns: dict[str, dict[str, list[Turn]]] = {}
        self.discarded: dict[str, dict[str, list[Turn]]] = {}

    def run_round(self, name: str, repetition: int) -> None:
        """Every engine runs one repetition of a workload, then the noisy ones again."""
        first = (repetition + WORKLOAD_NAMES.index(name)) % len(self._engines)
        order = [*self._engines[first:], *self._engines[:first]]
        turns = {engine.name: self._take_turn(engine, name, repetition) for engine in order}
        usual = median(turn.noise.canary_gb_per_s for turn in turns.values())
        for engine in order:
            turn = _judge(turns[engine.name], usual)
            for retry in range(1, self._max_retries + 1):
                if not turn.noisy:
                    break
                self._keep(self.discarded, name, engine, turn)
                again = repetition + retry * _RETRY_STRIDE
                turn = _judge(self._take_turn(engine, name, again), usual)
            self._keep(self.turns, name, engine, turn)

    def _take_turn(self, engine: PeerProcess, name: str, repetition: int) -> Turn:
        workload = make_workload(name, self._vocab_size, repetition)
        with self._meter.beside(engine.pid) as noise, engine.turn():
            engine.run([_warm_up_request(workload)])
            run = engine.run(workload.requests)
        print(
            f"{workload.name} {engine.name}: {run.wall_s:.2f} s, {noise.canary_gb_per_s:.0f} GB/s, "
            f"{noise.foreign_cpu_share:.0%} to others",
            file=sys.stderr,
            flush=True,
        )
        return Turn(repetition=repetition, run=run, noise=noise)

    def _keep(
        self, kept: dict[str, dict[str, list[Turn]]], name: str, engine: PeerProcess, turn: Turn
    ) -> None:
        kept.setdefault(name, {}).setdefault(engine.name, []).append(turn)


def _warm_up_request(workload: Workload) -> BenchmarkRequest:
    """A short request, to wake up threads; its prompt is the first one's reversed."""
    prompt = workload.requests[0].prompt_token_ids[::-1][:32]
    return BenchmarkRequest(prompt, 4)


def _judge(turn: Turn, usual_gb_per_s: float) -> Turn:
    difference = abs(turn.noise.canary_gb_per_s / usual_gb_per_s - 1)
    noisy = difference > _MAX_CANARY_DIFFERENCE or turn.noise.foreign_cpu_share > _MAX_FOREIGN_SHARE
    return replace(turn, noisy=noisy)
