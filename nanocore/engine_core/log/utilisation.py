"""MBU and MFU: the share of the machine's memory bandwidth and arithmetic that steps use.

A step's reads and operations follow from its counts (`ModelCost`), its time from the clock. Steps
whose rows all decode, and those with a prompt's chunk, are added up separately: the first wait for
memory, the others for arithmetic. A fold of the event log, on the io thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from nanocore.engine_core.log.event_log import Entries, StepEntry
from nanocore.protocol.errors import counted
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost


class StepTotals(msgspec.Struct):
    """Totals of one kind of steps since the start. num_bytes: read from memory."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0

    def add(self, cost: ModelCost, steps: Sequence[tuple[float, StepEntry]]) -> None:
        """Add up steps and the seconds that each took, in columns."""
        if not steps:
            return
        seconds, entries = zip(*steps, strict=True)
        ends = np.concatenate([step.decode_ends for step in entries])
        num_sampled, counts = len(ends), None  # of plain decodes: one token a row
        if any(step.chunks or step.decode_counts is not None for step in entries):
            decoded = [
                np.ones_like(step.decode_ends) if step.decode_counts is None else step.decode_counts
                for step in entries
            ]
            chunks = [(start + num, num) for step in entries for _, num, start in step.chunks]
            chunk_ends, chunk_counts = np.array(chunks, np.int64).reshape(-1, 2).T
            ends = np.concatenate((ends, chunk_ends))
            counts = np.concatenate((*decoded, chunk_counts))
            num_sampled = sum([step.num_decode_tokens + step.num_completed for step in entries])
        sizes = np.array([step.num_decode_tokens + step.num_prefill_tokens for step in entries])
        num_tokens = int(sizes.sum())
        self.num_steps += len(steps)
        self.num_tokens += num_tokens
        self.seconds += sum(seconds)
        self.num_bytes += float(cost.read_weight_bytes(sizes).sum()) + len(ends) * cost.state_bytes
        self.flops += num_tokens * cost.token_flops + 2 * num_sampled * cost.head_params
        for kind in cost.attention:
            seen = pairs = kind.seen(ends)  # of one token a row
            if counts is not None:
                seen, pairs = kind.seen(ends, counts), kind.pairs(ends, counts)
            self.num_bytes += int(seen.sum()) * kind.kv_bytes
            self.flops += float(pairs.sum()) * kind.pair_flops

    def numbers(self, speed: MachineSpeed | None) -> dict[str, float]:
        """Return totals and shares by name; those of the engine's metrics have their names.

        mbu, mfu: shares of bandwidth and of arithmetic that steps used, 0 to 1 (model bandwidth and
        model FLOP utilisation; 0 before the first). machine_*: what the machine gives, which is not
        less than steps have had of it. These are not there until the machine's speed is known.
        """
        numbers: dict[str, float] = {
            "steps": self.num_steps,
            "step_tokens": self.num_tokens,
            "step_seconds": self.seconds,
            "step_read_bytes": self.num_bytes,
            "step_flops": self.flops,
        }
        if speed is None:
            return numbers
        seconds = self.seconds or 1.0
        bytes_per_s = max(speed.bytes_per_s, self.num_bytes / seconds)
        flops_per_s = max(speed.flops_per_s, self.flops / seconds)
        return numbers | {
            "machine_bytes_per_second": bytes_per_s,
            "machine_flops_per_second": flops_per_s,
            "mbu": self.num_bytes / bytes_per_s / seconds,
            "mfu": self.flops / flops_per_s / seconds,
        }


class Utilisation:
    """Adds up the machine's use by steps. Steps without tokens do not count.

    Args:
        cost: of all ranks together. speed: likewise, as measured; None until it is.
    """

    def __init__(self, cost: ModelCost, speed: MachineSpeed | None) -> None:
        self._cost, self.speed = cost, speed
        self._decode, self._prefill = StepTotals(), StepTotals()
        self._undone: list[StepEntry] = []  # the one that the step loop is busy with, if any

    def take(self, entries: Entries) -> None:
        steps = self._undone + entries.steps
        self._undone = steps[len(entries.done) :]
        decodes: list[tuple[float, StepEntry]] = []
        prefills: list[tuple[float, StepEntry]] = []
        for done, step in zip(entries.done, steps, strict=False):
            if step.num_tokens:
                (prefills if step.chunks else decodes).append((done.busy_s, step))
        self._decode.add(self._cost, decodes)
        self._prefill.add(self._cost, prefills)

    def totals(self) -> dict[str, dict[str, float]]:
        """Numbers since the start by kind of step, see `StepTotals.numbers`."""
        speed = self.speed
        return {"decode": self._decode.numbers(speed), "prefill": self._prefill.numbers(speed)}

    def summary(self) -> Iterator[str]:
        for kind, numbers in self.totals().items():
            if num_steps := numbers["steps"]:
                shares = "the machine's speed was not measured"
                if "mbu" in numbers:
                    shares = (
                        f"{numbers['mbu']:.1%} of the memory's bandwidth (MBU), "
                        f"{numbers['mfu']:.1%} of the FLOP/s (MFU)"
                    )
                yield (
                    f"{kind}: {counted(num_steps, 'step')}, "
                    f"{counted(numbers['step_tokens'], 'token')}, "
                    f"{numbers['step_seconds']:.2f} s; {shares}"
                )
