"""The memory that an engine takes: a table (`--check`), and a line for the log."""

from __future__ import annotations

from collections.abc import Iterator

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.drafting.suffix import DEFAULT_MAX_BYTES
from nanocore.engine_core.process.cache_size import CacheSize
from nanocore.protocol.errors import counted
from nanocore.worker.cost.model_cost import ModelCost
from nanocore.worker.rank_messages import WorkerInfo


def joined_cost(ranks: list[WorkerInfo]) -> ModelCost:
    return ModelCost.joined([rank.cost for rank in ranks if rank.cost is not None])


def memory_table(
    config: EngineConfig,
    ranks: list[WorkerInfo],
    size: CacheSize,
    process_bytes: int = 0,
    grammar_bytes: int = 0,
) -> Iterator[str]:
    """Yield lines of at most 80 characters. Memory of ranks is that of the one that takes the most.

    process_bytes: of Python, libraries and the model's files. grammar_bytes: of the vocabulary for
    structured outputs, here and in the compile process, once it is loaded. Both about.
    """
    cost, capacity, num_bytes = joined_cost(ranks), size.capacity, _bytes_by_use(ranks, size)
    parameters = f"{cost.num_params / 1e6:,.1f} M parameters"
    if cost.active_params < cost.num_params:
        parameters += f", {cost.active_params / 1e6:,.1f} M active for a token"
    has_groups = len(size.kv_groups) > 1
    blocks = f"{capacity.num_blocks:,} blocks of {capacity.block_size} tokens"
    blocks = "if all layers keep it" if has_groups else blocks
    tokens = f"{_kv_token_bytes(ranks, size):,.0f} bytes per token, {blocks}"
    yield "memory" + (f", the most of {len(ranks)} ranks" if len(ranks) > 1 else "")
    yield _row("weights", num_bytes["weights"], parameters)
    yield _row("KV cache", num_bytes["KV cache"], tokens)
    if has_groups:
        yield from _group_rows(ranks, size)
    yield _row("activations", num_bytes["activations"], "in the largest step, estimate")
    yield _row("tables", num_bytes["tables"], "token ids, block ids, rotations")
    yield _row("process", process_bytes, "Python, libraries, tokenizer's files; about")
    yield _row("grammars", grammar_bytes, "for structured outputs, with their process; about")
    if draft_bytes := _draft_bytes(config):
        yield _row("drafts", draft_bytes, "suffixes of texts, at most")
    left_bytes = min(
        rank.memory_bytes - size.rank_bytes(rank) - rank.activation_bytes - rank.table_bytes
        for rank in ranks
    )
    yield _row("left", left_bytes, "of available memory")
    num_requests = min(config.sizes.max_num_seqs, capacity.num_requests(size.max_model_len))
    requests = counted(num_requests, "request")
    yield f"room for {requests} of {size.max_model_len:,} tokens at once"


def memory_summary(config: EngineConfig, ranks: list[WorkerInfo], size: CacheSize) -> str:
    """Return a line for the log about memory."""
    uses = _bytes_by_use(ranks, size).items()
    parts = ", ".join(f"{name} {num_bytes / 1e6:,.1f} MB" for name, num_bytes in uses)
    if draft_bytes := _draft_bytes(config):
        parts += f", drafts at most {draft_bytes / 1e6:,.1f} MB"
    where = "on each rank, " if len(ranks) > 1 else ""
    return f"memory {where}{parts}; {_kv_token_bytes(ranks, size):,.0f} bytes of KV a token"


def _bytes_by_use(ranks: list[WorkerInfo], size: CacheSize) -> dict[str, int]:
    """Return the most that a rank takes for each use."""
    return {
        "weights": max(rank.weight_bytes for rank in ranks),
        "KV cache": max(map(size.rank_bytes, ranks)),
        "activations": max(rank.activation_bytes for rank in ranks),
        "tables": max(rank.table_bytes for rank in ranks),
    }


def _group_rows(ranks: list[WorkerInfo], size: CacheSize) -> Iterator[str]:
    """Yield what the longest request holds of each cache group, over all ranks."""
    most_blocks = size.capacity.blocks_of(size.max_model_len)
    for group, most in zip(size.kv_groups, most_blocks, strict=True):
        of_ranks = [own for rank in ranks for own in rank.kv_groups if own.kind == group.kind]
        num_bytes = most * sum(own.block_bytes for own in of_ranks)
        note = f"{group.num_layers} layers, {most:,} blocks in the longest request"
        yield _row(f" {group.kind.name}", num_bytes, note)


def _row(name: str, num_bytes: int, note: str) -> str:
    return f"  {name:<14}{num_bytes / 1e6:>9,.1f} MB  {note}"


def _draft_bytes(config: EngineConfig) -> int:
    has_suffixes = config.speculative is not None and config.speculative.method == "suffix"
    return DEFAULT_MAX_BYTES if has_suffixes else 0


def _kv_token_bytes(ranks: list[WorkerInfo], size: CacheSize) -> float:
    groups = [group for rank in ranks for group in rank.kv_groups]
    return sum(group.block_bytes for group in groups) / size.capacity.block_size
