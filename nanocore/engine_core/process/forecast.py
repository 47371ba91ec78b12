"""The memory that an engine takes (`--check`, log), and the speed of its machine, measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import torch

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.drafting.suffix import DEFAULT_MAX_BYTES
from nanocore.engine_core.process.cache_size import CacheSize
from nanocore.protocol.errors import counted
from nanocore.worker.cost.machine_speed import measure_speed
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from nanocore.worker.rank_messages import WorkerInfo

_MEASURED_SHARE: Final = 8
"""A measurement takes 1/8 of a rank's memory: an engine that is short of it starts all the same."""


def speed_of_gpus(ranks: list[WorkerInfo]) -> MachineSpeed | None:
    """Return what the ranks have measured, all together; None on a CPU."""
    measured = [rank.speed for rank in ranks if rank.speed is not None]
    return MachineSpeed.joined(measured) if measured else None


def measure_cpu(ranks: list[WorkerInfo]) -> MachineSpeed:
    """Measure the CPU, whose cores the ranks share: all at once."""
    read_bytes = int(joined_cost(ranks).read_weight_bytes(1))
    max_bytes = min(rank.memory_bytes for rank in ranks) // _MEASURED_SHARE
    dtype = getattr(torch, ranks[0].dtype)
    return measure_speed(torch.device("cpu"), dtype, read_bytes, room_bytes=max_bytes)


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


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `--check --json` prints.

    kv_token_bytes: K and V of a token in all layers, over all ranks. active_params: used for one
    token. num_requests: of max_model_len each, that fit at once, by rows and blocks. process_bytes:
    of Python, libraries and the model's files. grammar_bytes: of the vocabulary for structured
    outputs, here and in the compile process, once it is loaded. Both about, and of the engine's own
    process, as are draft_bytes: what the proposer of drafts takes at most.
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
    num_requests: int
    process_bytes: int
    grammar_bytes: int
    draft_bytes: int
    groups: list[GroupForecast]
    ranks: list[RankMemory]


def forecast(
    config: EngineConfig,
    folder: str,
    architecture: str,
    ranks: list[WorkerInfo],
    size: CacheSize,
    process_bytes: int = 0,
    grammar_bytes: int = 0,
) -> Forecast:
    """Compute an engine's memory, and how many requests fit it."""
    whole, num_seqs = joined_cost(ranks), config.sizes.max_num_seqs
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
        num_requests=min(num_seqs, size.capacity.num_requests(size.max_model_len)),
        process_bytes=process_bytes,
        grammar_bytes=grammar_bytes,
        draft_bytes=_draft_bytes(config),
        groups=_groups(ranks, size),
        ranks=[_rank_memory(rank, size) for rank in ranks],
    )


def _draft_bytes(config: EngineConfig) -> int:
    has_suffixes = config.speculative is not None and config.speculative.method == "suffix"
    return DEFAULT_MAX_BYTES if has_suffixes else 0


def joined_cost(ranks: list[WorkerInfo]) -> ModelCost:
    return ModelCost.joined([rank.cost for rank in ranks if rank.cost is not None])


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


def table(forecast: Forecast) -> str:
    """Format a forecast as lines of at most 80 characters, for `--check`."""
    return "\n".join(_rows(forecast))


def _rows(forecast: Forecast) -> Iterator[str]:
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
    requests = counted(forecast.num_requests, "request")
    yield f"room for {requests} of {forecast.max_model_len:,} tokens at once"


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
