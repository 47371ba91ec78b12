"""Steps in two phases: plans that await masks, run as the engine runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput
from tests.worker.running import record_steps

Allowed = Mapping[int, NDArray[np.bool_]]
"""Of rows that may not sample every token, which they may; [V]."""


def pack_masks(step: int, allowed: Allowed) -> TokenMasks:
    words = [
        np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").tobytes()
        for mask in allowed.values()
    ]
    rows = np.array([*allowed], "<i4").tobytes()
    return TokenMasks(step=step, rows=rows, words=b"".join(words))


def run_masked(
    runner: ModelRunner,
    plans: Sequence[SchedulerOutput],
    allowed: Callable[[int, list[int]], Allowed],
    take: Callable[[int, ModelRunnerOutput], None],
    depth: int = 1,
) -> None:
    """Run plans with up to so many in flight.

    allowed: masks of (plan number, rows that it samples), asked for when every result before
    was taken. take: a plan's number, and its result.
    """
    steps = record_steps(runner.batch)
    in_flight: deque[tuple[int, PendingOutput]] = deque()

    def take_one() -> None:
        number, pending = in_flight.popleft()
        take(number, pending.wait())

    for number, plan in enumerate(plans):
        pending = runner.begin(plan)
        in_flight.append((number, pending))
        if pending.awaits_masks:
            while len(in_flight) > 1:
                take_one()
            assert not pending.is_done()
            masks = allowed(number, steps[-1].sample_rows.tolist())
            pending.sample(pack_masks(plan.step, masks))
            assert not pending.awaits_masks
        if len(in_flight) == depth:
            take_one()
    while in_flight:
        take_one()
