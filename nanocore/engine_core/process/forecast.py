"""What an engine's memory holds, and how fast its model could run on its machine at the best.

Times are those of a roofline (Williams et al. 2009): what a step reads and computes, by
`ModelCost`, over what the machine was measured to read and compute, the slower of the two; nothing
is lost between kernels, layers, ranks or steps. It is what steps can be held against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from nanocore.engine_core.config import EngineConfig
from nanocore.worker.model_cost import (
    MachineSpeed,
    ModelCost,
    StepWork,
    chunk_work,
    decode_work,
)
from nanocore.worker.rank_messages import WorkerInfo

_FIRST_CONTEXT: Final = 1024
_GROWTH: Final = 4


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. activation_bytes: about, of the largest step. table_bytes: of token ids, block
    ids and rotations. left_bytes: what it could have beside; may be below 0 if it is short.
    """

    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    table_bytes: int
    left_bytes: int


class ContextForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests of this many tokens each.

    num_requests: that run at once: rows and blocks for them. decode_s: of a token of one request
    alone; full_decode_s: of a token of each, if so many run. prefill_s: of a prompt alone.
    """

    context_tokens: int
    num_requests: int
    decode_s: float
    full_decode_s: float
    prefill_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine. kv_token_bytes: of a token's K and V, over all ranks; active_params: those that
    are at work for a token. speed: of all ranks together, as measured.
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
    ranks: list[RankMemory]
    contexts: list[ContextForecast]


class Roofline:
    """The least time of steps on ranks of these costs and speeds, in order of rank.

    Args:
        tp_size: ranks of a stage. These compute at the same time, and stages one after the other.
    """

    def __init__(
        self, costs: list[ModelCost], speeds: list[MachineSpeed], tp_size: int = 1
    ) -> None:
        ranks = list(zip(costs, speeds, strict=True))
        self._stages = [ranks[i : i + tp_size] for i in range(0, len(ranks), tp_size)]

    def decode_s(self, num_rows: int, context: int) -> float:
        """Seconds of a token of each of so many rows of this context."""
        return self._seconds(lambda cost: decode_work(cost, num_rows, context))

    def prefill_s(self, num_tokens: int, budget: int) -> float:
        """Seconds of a prompt, in chunks of `budget` tokens."""
        ends = [*range(budget, num_tokens, budget), num_tokens]
        return sum(self._chunk_s(end - 1 - (end - 1) % budget, end, num_tokens) for end in ends)

    def _chunk_s(self, start: int, end: int, num_tokens: int) -> float:
        return self._seconds(lambda cost: chunk_work(cost, start, end, end == num_tokens))

    def _seconds(self, work: Callable[[ModelCost], StepWork]) -> float:
        return sum(
            max(_least_s(work(cost), speed) for cost, speed in stage) for stage in self._stages
        )


def _least_s(work: StepWork, speed: MachineSpeed) -> float:
    return speed.least_s(work.num_bytes, work.flops)


def forecast(
    config: EngineConfig,
    model: tuple[str, str],
    ranks: list[WorkerInfo],
    sizes: tuple[int, int],
    speeds: list[MachineSpeed],
) -> Forecast:
    """Of an engine with these ranks.

    Args:
        model: its folder and architecture. sizes: blocks, and tokens of a request at most.
        speeds: of each rank, while the others are busy, too.
    """
    num_blocks, max_model_len = sizes
    costs, whole = _costs(ranks), joined_cost(ranks)
    block_size, num_seqs = config.sizes.block_size, config.sizes.max_num_seqs
    roofline = Roofline(costs, speeds, config.tensor_parallel_size)

    def of_context(context: int) -> ContextForecast:
        num_requests = min(num_seqs, num_blocks // -(-context // block_size))
        return ContextForecast(
            context_tokens=context,
            num_requests=num_requests,
            decode_s=roofline.decode_s(1, context),
            full_decode_s=roofline.decode_s(max(1, num_requests), context),
            prefill_s=roofline.prefill_s(context, config.sizes.max_num_batched_tokens),
        )

    return Forecast(
        model=model[0],
        architecture=model[1],
        device=", ".join(dict.fromkeys(rank.device for rank in ranks)),
        dtype=ranks[0].dtype,
        kernels=ranks[0].kernels,
        num_params=whole.num_params,
        active_params=whole.active_params,
        kv_token_bytes=sum(rank.kv_block_bytes for rank in ranks) / block_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        speed=MachineSpeed.joined(speeds),
        ranks=[_memory(rank, num_blocks) for rank in ranks],
        contexts=[of_context(context) for context in _contexts(max_model_len)],
    )


def joined_cost(ranks: list[WorkerInfo]) -> ModelCost:
    """Of all ranks together."""
    return ModelCost.joined(_costs(ranks))


def _costs(ranks: list[WorkerInfo]) -> list[ModelCost]:
    return [rank.cost for rank in ranks if rank.cost is not None]


def _memory(rank: WorkerInfo, num_blocks: int) -> RankMemory:
    kv_bytes = num_blocks * rank.kv_block_bytes
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
