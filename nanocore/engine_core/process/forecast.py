"""The memory that an engine takes, and the best speed that its machine allows (`--check`, log).

Times are those of a roofline (Williams et al. 2009): a step's reads and arithmetic (`ModelCost`)
over the machine's measured rates, the slower of the two. Nothing is lost between kernels, layers,
ranks or steps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.drafting.suffix import DEFAULT_MAX_BYTES
from nanocore.engine_core.process.cache_size import CacheSize
from nanocore.system.cache_folder import CacheFolder
from nanocore.worker.cost.machine_speed import STRETCH_S, measure_speed
from nanocore.worker.cost.model_cost import (
    MachineSpeed,
    ModelCost,
    StepWork,
    step_work,
)
from nanocore.worker.rank_messages import WorkerInfo

_MAX_SPEED_BYTES: Final = 4096
_MEASURED_SHARE: Final = 8
"""A measurement takes 1/8 of a rank's memory: an engine that is short of it starts all the same."""


def machine_speeds(ranks: list[WorkerInfo], stretch_s: float = STRETCH_S) -> list[MachineSpeed]:
    """Measure the speed of each rank, in order, while the others are busy, too.

    A GPU belongs to its rank; loaded ranks have measured theirs, and in a dry run the first stands
    for all. The CPU's cores are shared evenly and measured here, all at once. What they gave while
    no other program used them is kept in the user's cache folder.

    stretch_s: see `measure_speed`.
    """
    if measured := _measured_by_ranks(ranks):
        return measured
    device, dtype, read_bytes = torch.device(ranks[0].device), ranks[0].dtype, _read_bytes(ranks)
    if device.type != "cpu":
        one = measure_speed(device, getattr(torch, dtype), max(read_bytes), stretch_s)
        return [one] * len(ranks)
    max_bytes = min(rank.memory_bytes for rank in ranks) // _MEASURED_SHARE
    whole = measure_speed(device, getattr(torch, dtype), sum(read_bytes), stretch_s, max_bytes)
    if whole.is_quiet:
        _cache().write(_speed_name(dtype, sum(read_bytes)), msgspec.json.encode(whole))
    return [whole.shared(len(ranks))] * len(ranks)


def known_speeds(ranks: list[WorkerInfo]) -> list[MachineSpeed] | None:
    """Return `machine_speeds` that were measured before: by a GPU's ranks, or of this CPU since it
    was booted. None if there are none.
    """
    if measured := _measured_by_ranks(ranks):
        return measured
    known = _cache().read(_speed_name(ranks[0].dtype, sum(_read_bytes(ranks))), _MAX_SPEED_BYTES)
    if known is None:
        return None
    return [msgspec.json.decode(known, type=MachineSpeed).shared(len(ranks))] * len(ranks)


def _measured_by_ranks(ranks: list[WorkerInfo]) -> list[MachineSpeed]:
    return [rank.speed for rank in ranks if rank.speed is not None]


def _read_bytes(ranks: list[WorkerInfo]) -> list[int]:
    return [int(rank.cost.read_weight_bytes(1)) for rank in ranks if rank.cost is not None]


def _cache() -> CacheFolder:
    return CacheFolder("speeds", "the machine's speed is measured at each start")


def _speed_name(dtype: str, read_bytes: int) -> str:
    """Name of a CPU's speed in the cache: a digest of all that it depends on."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    cores = sorted(os.sched_getaffinity(0))
    parts = (boot.read_text(), cores, torch.get_num_threads(), torch.__version__, dtype, read_bytes)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_FIRST_CONTEXT: Final = 1024
_GROWTH: Final = 4


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank.

    activation_bytes: of the largest step, about. table_bytes: token ids, block ids and rotations.
    left_bytes: what remains of the memory that the rank may take; below 0 if it is short.
    """

    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    table_bytes: int
    left_bytes: int


class GroupForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A cache group. block_bytes: of a block, over all ranks. most_blocks: that the longest request
    holds at once.
    """

    name: str
    num_layers: int
    block_bytes: int
    most_blocks: int


class ContextForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Best times for requests of context_tokens each.

    num_requests: that fit at once, by rows and blocks. decode_s: a token of one request alone.
    full_decode_s: a token of each of num_requests. prefill_s: a prompt alone.
    """

    context_tokens: int
    num_requests: int
    decode_s: float
    full_decode_s: float
    prefill_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `--check --json` prints.

    kv_token_bytes: K and V of a token in all layers, over all ranks. active_params: used for one
    token. speed: of all ranks together, as measured. process_bytes: of Python, libraries and the
    model's files. grammar_bytes: of the vocabulary for structured outputs, here and in the compile
    process, once it is loaded. Both about, and of the engine's own process, as are draft_bytes:
    what the proposer of drafts takes at most.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    kernels: str
    num_params: int
    active_params: int
    kv_token_bytes: float
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    speed: MachineSpeed
    process_bytes: int
    grammar_bytes: int
    draft_bytes: int
    groups: list[GroupForecast]
    ranks: list[RankMemory]
    contexts: list[ContextForecast]


class Roofline:
    """The least time of steps on ranks of these costs and speeds, in order of rank.

    tp_size: ranks of a stage. These compute at the same time, and stages one after the other.
    """

    def __init__(
        self, costs: list[ModelCost], speeds: list[MachineSpeed], tp_size: int = 1
    ) -> None:
        ranks = list(zip(costs, speeds, strict=True))
        self._stages = [ranks[i : i + tp_size] for i in range(0, len(ranks), tp_size)]

    def decode_s(self, num_rows: int, context: int) -> float:
        """Seconds of a step that decodes num_rows rows of this context."""
        return self._seconds(lambda cost: step_work(cost, num_rows, context))

    def prefill_s(self, num_tokens: int, budget: int) -> float:
        """Seconds of a prompt, in chunks of `budget` tokens."""

        def chunk_s(end: int) -> float:
            count, is_last = (end - 1) % budget + 1, end == num_tokens
            return self._seconds(lambda cost: step_work(cost, 1, end, count, samples=is_last))

        return sum(map(chunk_s, [*range(budget, num_tokens, budget), num_tokens]))

    def _seconds(self, work: Callable[[ModelCost], StepWork]) -> float:
        def least_s(cost: ModelCost, speed: MachineSpeed) -> float:
            step = work(cost)
            return speed.least_s(step.num_bytes, step.flops)

        return sum(max(least_s(*rank) for rank in stage) for stage in self._stages)


def forecast(
    config: EngineConfig,
    folder: str,
    architecture: str,
    ranks: list[WorkerInfo],
    size: CacheSize,
    speeds: list[MachineSpeed],
    process_bytes: int = 0,
    grammar_bytes: int = 0,
) -> Forecast:
    """Compute an engine's memory and best times. speeds: of each rank, while all are busy."""
    whole = joined_cost(ranks)
    num_seqs = config.sizes.max_num_seqs
    roofline = Roofline(_costs(ranks), speeds, config.tensor_parallel_size)

    def at_context(context: int) -> ContextForecast:
        num_requests = min(num_seqs, size.capacity.num_requests(context))
        return ContextForecast(
            context_tokens=context,
            num_requests=num_requests,
            decode_s=roofline.decode_s(1, context),
            full_decode_s=roofline.decode_s(max(1, num_requests), context),
            prefill_s=roofline.prefill_s(context, config.sizes.max_num_batched_tokens),
        )

    return Forecast(
        model=folder,
        architecture=architecture,
        device=", ".join(dict.fromkeys(rank.device for rank in ranks)),
        dtype=ranks[0].dtype,
        kernels=ranks[0].kernels,
        num_params=whole.num_params,
        active_params=whole.active_params,
        kv_token_bytes=_kv_token_bytes(ranks, size.capacity.block_size),
        num_blocks=size.capacity.num_blocks,
        block_size=size.capacity.block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=num_seqs,
        speed=MachineSpeed.joined(speeds),
        process_bytes=process_bytes,
        grammar_bytes=grammar_bytes,
        draft_bytes=_draft_bytes(config),
        groups=_groups(ranks, size),
        ranks=[_rank_memory(rank, size) for rank in ranks],
        contexts=[at_context(context) for context in _contexts(size.max_model_len)],
    )


def _draft_bytes(config: EngineConfig) -> int:
    has_suffixes = config.speculative is not None and config.speculative.method == "suffix"
    return DEFAULT_MAX_BYTES if has_suffixes else 0


def joined_cost(ranks: list[WorkerInfo]) -> ModelCost:
    return ModelCost.joined(_costs(ranks))


def _costs(ranks: list[WorkerInfo]) -> list[ModelCost]:
    return [rank.cost for rank in ranks if rank.cost is not None]


def _kv_token_bytes(ranks: list[WorkerInfo], block_size: int) -> float:
    groups = [group for rank in ranks for group in rank.kv_groups]
    return sum(group.block_bytes for group in groups) / block_size


def _groups(ranks: list[WorkerInfo], size: CacheSize) -> list[GroupForecast]:
    of_ranks = [group for rank in ranks for group in rank.kv_groups]
    most_blocks = size.capacity.blocks_of(size.max_model_len)
    return [
        GroupForecast(
            name=group.kind.name,
            num_layers=group.num_layers,
            block_bytes=sum(own.block_bytes for own in of_ranks if own.kind == group.kind),
            most_blocks=most,
        )
        for group, most in zip(size.kv_groups, most_blocks, strict=True)
    ]


def _rank_memory(rank: WorkerInfo, size: CacheSize) -> RankMemory:
    kv_bytes = size.rank_bytes(rank)
    return RankMemory(
        weight_bytes=rank.weight_bytes,
        kv_cache_bytes=kv_bytes,
        activation_bytes=rank.activation_bytes,
        table_bytes=rank.table_bytes,
        left_bytes=rank.memory_bytes - kv_bytes - rank.activation_bytes - rank.table_bytes,
    )


def _contexts(max_model_len: int) -> list[int]:
    """Powers of 4 from 1,024 on, and the longest request."""
    contexts, context = [], _FIRST_CONTEXT
    while context < max_model_len:
        contexts.append(context)
        context *= _GROWTH
    return [*contexts, max_model_len]


def table(forecast: Forecast) -> str:
    """Format a forecast as lines of at most 80 characters, for `--check`."""
    contexts = map(_context_row, forecast.contexts)
    return "\n".join(
        [*_memory_rows(forecast), "", *_machine_rows(forecast), "", _HEADINGS, *contexts]
    )


def _memory_rows(forecast: Forecast) -> Iterator[str]:
    ranks = forecast.ranks
    parameters = f"{forecast.num_params / 1e6:,.1f} M parameters"
    if forecast.active_params < forecast.num_params:
        parameters += f", {forecast.active_params / 1e6:,.1f} M active for a token"
    blocks = f"{forecast.num_blocks:,} blocks of {forecast.block_size} tokens"
    yield "memory" + (f", the most of {len(ranks)} ranks" if len(ranks) > 1 else "")
    groups = forecast.groups if len(forecast.groups) > 1 else []
    drafts = ("drafts", forecast.draft_bytes, "suffixes of texts, at most")
    for name, num_bytes, note in (
        ("weights", max(rank.weight_bytes for rank in ranks), parameters),
        (
            "KV cache",
            max(rank.kv_cache_bytes for rank in ranks),
            f"{forecast.kv_token_bytes:,.0f} bytes per token"
            + (", if all layers keep it" if groups else f", {blocks}"),
        ),
        *(
            (
                f" {group.name}",
                group.most_blocks * group.block_bytes,
                f"{group.num_layers} layers, {group.most_blocks:,} blocks in the longest request",
            )
            for group in groups
        ),
        (
            "activations",
            max(rank.activation_bytes for rank in ranks),
            "in the largest step, estimate",
        ),
        ("tables", max(rank.table_bytes for rank in ranks), "token ids, block ids, rotations"),
        ("process", forecast.process_bytes, "Python, libraries, tokenizer's files; about"),
        ("grammars", forecast.grammar_bytes, "for structured outputs, with their process; about"),
        *([drafts] if forecast.draft_bytes else []),
        ("left", min(rank.left_bytes for rank in ranks), "of available memory"),
    ):
        yield f"  {name:<14}{num_bytes / 1e6:>9,.1f} MB  {note}"


def _machine_rows(forecast: Forecast) -> Iterator[str]:
    speed = forecast.speed
    busy = "" if speed.is_quiet else ", while other programs used it: it has more to give"
    yield f"machine, measured now{busy}: {forecast.device}"
    yield f"  reads      {speed.bytes_per_s / 1e9:>12,.1f} GB/s from memory"
    if speed.near_bytes:
        near = f"from caches, {speed.near_bytes / 1e6:,.1f} MB at most"
        yield f"             {speed.near_bytes_per_s / 1e9:>10,.1f} GB/s {near}"
    yield f"  multiplies {speed.flops_per_s / 1e12:>12,.2f} TFLOP/s"


_HEADINGS: Final = """\
at best requests       decode, alone         decode, all             prefill
 tokens  at once        ms  tokens/s        ms  tokens/s        ms  tokens/s"""


def _context_row(one: ContextForecast) -> str:
    def speed(num_tokens: int, seconds: float) -> str:
        digits = 2 if seconds < 1 else 0
        return f" {seconds * 1e3:>9,.{digits}f} {num_tokens / seconds:>9,.0f}"

    return (
        f"{one.context_tokens:>7,}{one.num_requests:>9,}{speed(1, one.decode_s)}"
        f"{speed(one.num_requests, one.full_decode_s)}{speed(one.context_tokens, one.prefill_s)}"
    )


def memory_summary(config: EngineConfig, workers: list[WorkerInfo], size: CacheSize) -> str:
    """Return a line for the log about memory."""
    ranks = [_rank_memory(rank, size) for rank in workers]
    parts = ", ".join(
        f"{name} {max(getattr(rank, field) for rank in ranks) / 1e6:,.1f} MB"
        for name, field in (
            ("weights", "weight_bytes"),
            ("KV cache", "kv_cache_bytes"),
            ("activations", "activation_bytes"),
            ("tables", "table_bytes"),
        )
    )
    if draft_bytes := _draft_bytes(config):
        parts += f", drafts at most {draft_bytes / 1e6:,.1f} MB"
    where = "on each rank, " if len(ranks) > 1 else ""
    kv_token_bytes = _kv_token_bytes(workers, size.capacity.block_size)
    return f"memory {where}{parts}; {kv_token_bytes:,.0f} bytes of KV a token"


def speed_summary(forecast: Forecast) -> str:
    """Return a line for the log about the longest requests."""
    speed, longest = forecast.speed, forecast.contexts[-1]
    bound, busy = "at best", ""
    if not speed.is_quiet:
        bound, busy = "about", ", while other programs used the machine: it has more to give"
    return (
        f"{bound} {longest.decode_s * 1e3:,.2f} ms a token and {longest.prefill_s * 1e3:,.0f} ms a "
        f"prompt at {longest.context_tokens} tokens, alone: {speed.bytes_per_s / 1e9:,.1f} GB/s "
        f"and {speed.flops_per_s / 1e12:,.2f} TFLOP/s were measured{busy}"
    )
