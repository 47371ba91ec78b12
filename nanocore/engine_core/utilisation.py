"""MBU and MFU: the share of the machine's memory bandwidth and arithmetic that steps use.

A step's reads and operations follow from its counts (`ModelCost`), its time from the clock. Steps
whose rows all decode, and those with a prompt's chunk, are added up separately: the first wait for
memory, the others for arithmetic. The step loop notes a step in well under a microsecond, by
reference; another thread adds them up, plain decodes many at a time, in columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from nanocore.engine_core.scheduling.columns import IntArray
from nanocore.engine_core.scheduling.step_plan import Chunk, StepPlan
from nanocore.protocol.errors import counted
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost

_Note = tuple[float, IntArray, IntArray | None, list[Chunk], int]
"""A step with more than plain decodes: its seconds; decode_ends, decode_counts and chunks of its
plan, which change no more; and how many rows complete their tokens with it."""


class StepTotals(msgspec.Struct):
    """Totals of one kind of steps since the start. num_bytes: read from memory."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0


class Utilisation:
    """Adds up the machine's use by steps. Steps without tokens do not count.

    Steps without tokens are none.

    Args:
        cost: of all ranks together. speed: likewise, as measured; None until it is.
    """

    def __init__(self, cost: ModelCost, speed: MachineSpeed | None) -> None:
        self._cost, self.speed = cost, speed
        self._decode, self._prefill = StepTotals(), StepTotals()
        self._ends: deque[tuple[float, IntArray]] = deque()  # of plain decodes, with their seconds
        self._decode_notes: deque[_Note] = deque()  # of decodes with drafts
        self._prefill_notes: deque[_Note] = deque()

    def add(self, seconds: float, plan: StepPlan) -> None:
        """Note a completed step. Called by the step loop.

        seconds: that the step loop was busy with it; with several in flight, from the result of the
        one before it.
        """
        if plan.chunks or plan.decode_counts is not None:
            notes = self._prefill_notes if plan.chunks else self._decode_notes
            ends, counts = plan.decode_ends, plan.decode_counts
            notes.append((seconds, ends, counts, plan.chunks, len(plan.completed)))
        elif len(plan.decode_ends):
            self._ends.append((seconds, plan.decode_ends))

    def fold(self) -> None:
        """Add up the noted steps. One thread at a time calls it, while the step loop may go on."""
        self._add_up_ends()
        _add_up_notes(self._decode, self._decode_notes, self._cost)
        _add_up_notes(self._prefill, self._prefill_notes, self._cost)

    def totals(self) -> dict[str, float]:
        """Counters since the start, and shares, named by kind of step and unit.

        mbu, mfu: shares of bandwidth and of arithmetic that steps of a kind used, 0 to 1 (model
        bandwidth and model FLOP utilisation; 0 before the first). peak_*: what the machine gives,
        which is not less than steps have had of it. These are not there until the machine's speed
        is known.
        """
        speed, numbers = self.speed, dict[str, float]()
        self.fold()
        for kind, totals in (("decode", self._decode), ("prefill", self._prefill)):
            numbers |= {
                f"{kind}_steps": totals.num_steps,
                f"{kind}_tokens": totals.num_tokens,
                f"{kind}_seconds": totals.seconds,
                f"{kind}_bytes": totals.num_bytes,
                f"{kind}_flops": totals.flops,
            }
            if speed is None:
                continue
            seconds, num_steps = totals.seconds or 1.0, totals.num_steps or 1
            read_s = totals.num_steps * speed.read_s(totals.num_bytes / num_steps)
            read_s = min(read_s, seconds)
            peak_flops_per_s = max(speed.flops_per_s, totals.flops / seconds)
            numbers |= {
                f"{kind}_peak_bytes_per_second": totals.num_bytes / read_s
                if read_s
                else speed.bytes_per_s,
                f"{kind}_peak_flops_per_second": peak_flops_per_s,
                f"{kind}_mbu": read_s / seconds,
                f"{kind}_mfu": totals.flops / peak_flops_per_s / seconds,
            }
        return numbers

    def summary(self) -> Iterator[str]:
        numbers = self.totals()
        for kind in ("decode", "prefill"):
            if num_steps := numbers[f"{kind}_steps"]:
                shares = "the machine's speed was not measured"
                if self.speed is not None:
                    shares = (
                        f"{numbers[f'{kind}_mbu']:.1%} of the memory's bandwidth (MBU), "
                        f"{numbers[f'{kind}_mfu']:.1%} of the FLOP/s (MFU)"
                    )
                yield (
                    f"{kind}: {counted(num_steps, 'step')}, "
                    f"{counted(numbers[f'{kind}_tokens'], 'token')}, "
                    f"{numbers[f'{kind}_seconds']:.2f} s; {shares}"
                )

    def _add_up_ends(self) -> None:
        """Add up plain decodes: all of them do the same once per row, so columns are joined."""
        cost, totals = self._cost, self._decode
        if not (noted := [self._ends.popleft() for _ in range(len(self._ends))]):
            return
        totals.seconds += sum([seconds for seconds, _ in noted])
        steps = [step_ends for _, step_ends in noted]
        ends = np.concatenate(steps)
        totals.num_steps += len(steps)
        totals.num_tokens += len(ends)
        if cost.expert_bytes:
            sizes = np.array(list(map(len, steps)))
            totals.num_bytes += float(cost.read_weight_bytes(sizes).sum())
        else:
            totals.num_bytes += len(steps) * cost.weight_bytes
        totals.flops += len(ends) * (cost.token_flops + 2 * cost.head_params)
        for kind in cost.attention:
            seen = int(kind.seen(ends).sum())
            totals.num_bytes += seen * kind.kv_bytes
            totals.flops += float(seen) * kind.pair_flops


def _add_up_notes(totals: StepTotals, notes: deque[_Note], cost: ModelCost) -> None:
    for _ in range(len(notes)):
        seconds, decode_ends, decode_counts, chunks, num_completed = notes.popleft()
        totals.seconds += seconds
        rows = np.array([(start + count, count) for _, count, start in chunks], np.int64)
        ends, counts = rows.reshape(-1, 2).T
        decoded = np.ones_like(decode_ends) if decode_counts is None else decode_counts
        ends, counts = np.concatenate((decode_ends, ends)), np.concatenate((decoded, counts))
        num_tokens = int(counts.sum())
        totals.num_steps += 1
        totals.num_tokens += num_tokens
        totals.num_bytes += cost.read_weight_bytes(num_tokens)
        totals.flops += num_tokens * cost.token_flops
        totals.flops += 2 * (int(decoded.sum()) + num_completed) * cost.head_params
        for kind in cost.attention:
            totals.num_bytes += int(kind.seen(ends, counts).sum()) * kind.kv_bytes
            totals.flops += float(kind.pairs(ends, counts).sum()) * kind.pair_flops
