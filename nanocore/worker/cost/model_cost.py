"""What a rank's part of a model takes of the machine: bytes read and operations done, by counts.

A step reads every weight once, but of experts those that its tokens choose, and the keys and values
that its rows attend to. An operation is a multiplication or an addition. Norms, activations and
sampling are left out: they are small, and so are writes. Imports nothing heavy: a count crosses the
pipe from a rank to its engine, and the step loop computes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """Attention cost of all layers with the same window.

    window: tokens that a token sees, itself included; 0: all before it. kv_bytes: read of each
    token that a row sees. pair_flops: of a token and one that it sees, over all heads.
    """

    window: int
    kv_bytes: float
    pair_flops: int

    def seen(self, num_tokens: Any, count: Any = 1) -> Any:
        """Tokens whose K and V are read for the last `count` of num_tokens: numbers or columns."""
        return _least(num_tokens, self.window + count - 1) if self.window else num_tokens

    def pairs(self, num_tokens: Any, count: Any) -> Any:
        """Query-key pairs of the last `count` of num_tokens; numbers or columns."""
        return self._pairs(num_tokens) - self._pairs(num_tokens - count)

    def _pairs(self, num_tokens: Any) -> Any:
        near = _least(num_tokens, self.window) if self.window else num_tokens
        return near * (near + 1) // 2 + (num_tokens - near) * self.window


def by_window(costs: Iterable[AttentionCost]) -> list[AttentionCost]:
    """Their sums, one for each window, in the order of windows."""
    groups: dict[int, list[AttentionCost]] = {}
    for cost in costs:
        groups.setdefault(cost.window, []).append(cost)
    return [
        AttentionCost(
            window=window,
            kv_bytes=sum(one.kv_bytes for one in group),
            pair_flops=sum(one.pair_flops for one in group),
        )
        for window, group in sorted(groups.items())
    ]


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one rank's part of the model, or of several parts together (`joined`).

    num_params: of the whole model, on every rank. token_params: those that every token is
    multiplied with; head_params: those that only a token that samples is. expert_params: of routed
    experts, num_experts of which each token is multiplied with num_experts_per_tok; 0 if there are
    none.
    weight_bytes: read by every step. expert_bytes: of routed experts, read as far as tokens choose
    them. lookup_bytes: of embeddings that are no head, and hardly read. attention: by window.
    state_bytes: of a row's states, which a step reads.
    """

    num_params: int
    token_params: int
    head_params: int
    expert_params: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    weight_bytes: int
    expert_bytes: int = 0
    lookup_bytes: int = 0
    attention: list[AttentionCost]
    state_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.weight_bytes + self.expert_bytes + self.lookup_bytes

    @property
    def active_params(self) -> int:
        """Parameters at work for one token: all but the experts that it does not choose.

        Of all ranks together.
        """
        return self.num_params - round((1 - self._expert_share) * self.expert_params)

    @property
    def token_flops(self) -> float:
        """Operations with each token's weights, without the head."""
        return 2 * (self.token_params + self._expert_share * self.expert_params)

    @property
    def _expert_share(self) -> float:
        return self.num_experts_per_tok / self.num_experts if self.num_experts else 0.0

    def read_weight_bytes(self, num_tokens: Any) -> Any:
        """Bytes of weights that a step of num_tokens reads; a number or a column.

        Of experts, what tokens choose on average if each expert is as likely as any other.
        """
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self._expert_share) ** num_tokens)

    @classmethod
    def joined(cls, costs: Sequence[ModelCost]) -> ModelCost:
        """Sum over ranks: what a step costs on all of them."""
        of_model = ("num_params", "num_experts", "num_experts_per_tok")
        joined = {
            name: (max if name in of_model else sum)(getattr(cost, name) for cost in costs)
            for name in cls.__struct_fields__
            if name != "attention"
        }
        every = (one for cost in costs for one in cost.attention)
        return cls(**joined, attention=by_window(every))


class MachineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits of a rank's device: bytes read from memory and operations per second."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def joined(cls, speeds: Sequence[MachineSpeed]) -> MachineSpeed:
        return cls(
            bytes_per_s=sum(speed.bytes_per_s for speed in speeds),
            flops_per_s=sum(speed.flops_per_s for speed in speeds),
        )


def _least(one: Any, other: Any) -> Any:
    return min(one, other) if isinstance(one, int) else one.clip(max=other)
