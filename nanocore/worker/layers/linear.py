"""Linear layers and the vocabulary's matrices, split over tensor parallel ranks.

A column-parallel layer followed by a row-parallel one needs one all-reduce (Megatron-LM: Shoeybi et
al. 2019). Projections of the same input are stacked into one weight, whatever the checkpoint does.
The embedding and the head are split by token ids: a rank looks up and scores the tokens of its
range only; ranges are equal but for the last, so any vocabulary can be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, Rotary
from nanocore.kernels.interface import Kernels
from nanocore.worker.layers.packing import Weight, WeightPacker
from nanocore.worker.loading.weights import Entries, LoadedSlice, Projection, TensorEntry, whole
from nanocore.worker.placement import Placement


class StepContext(msgspec.Struct, frozen=True):
    """What layers see of a step.

    metadata: attention's, of each group of layers that keep the same tokens: see `KVCache.group`.
    rotary: of all positions, by `AttentionConfig.rotation`. lanes: [T] by name, what they are told
    of each token beside its hidden state; see `worker/step/lanes.py`.
    """

    kernels: Kernels
    metadata: Sequence[AttentionMetadata]
    rotary: dict[str, Rotary]
    lanes: dict[str, Tensor] = {}


class RowShard(msgspec.Struct, frozen=True):
    """Rows of a projection that this rank keeps: `size` of `total`, from `start` on."""

    total: int
    start: int
    size: int

    @property
    def kept(self) -> slice:
        """This rank's rows, as a slice of all."""
        return slice(self.start, self.start + self.size)

    @classmethod
    def share(cls, placement: Placement, total: int, what: str) -> RowShard:
        """An even share. Raises ConfigError, naming `what`, if there is none."""
        size = placement.share(total, what)
        return cls(total, placement.tp.rank * size, size)

    @classmethod
    def kv_heads(cls, placement: Placement, num_heads: int, head_dim: int) -> RowShard:
        """Whole KV heads; each is kept by several ranks if there are fewer heads than ranks."""
        rank, size = placement.tp.rank, placement.tp.size
        if size > num_heads and size % num_heads == 0:
            return cls(num_heads * head_dim, rank * num_heads // size * head_dim, head_dim)
        num_kept = placement.share(num_heads, "the number of KV heads (num_key_value_heads)")
        return cls(num_heads * head_dim, rank * num_kept * head_dim, num_kept * head_dim)


def stacked(parts: list[RowShard]) -> list[RowShard]:
    """The same rows of one projection that stacks them whole, one after the other."""
    total = sum(rows.total for rows in parts)
    starts = accumulate((rows.total for rows in parts), initial=0)
    return [
        RowShard(total, start + rows.start, rows.size)
        for start, rows in zip(starts, parts, strict=False)
    ]


def row_entry(target: Tensor, rows: list[RowShard]) -> TensorEntry:
    """These rows of a checkpoint's tensor, which the target has one after the other."""
    targets = target.split([one.size for one in rows])
    parts = [LoadedSlice(to, (one.kept,)) for to, one in zip(targets, rows, strict=True)]
    return TensorEntry((rows[0].total, *target.shape[1:]), parts)


class ColumnParallelLinear:
    """y = x W^T + b, where W stacks this rank's rows of several projections.

    sizes: output features of each projection on this rank.
    """

    def __init__(
        self, placement: Placement, in_features: int, parts: list[RowShard], *, bias: bool = False
    ) -> None:
        self.parts = parts
        self.sizes = [rows.size for rows in parts]
        self.weight = Weight(placement, sum(self.sizes), in_features)
        self.bias = placement.empty(sum(self.sizes)) if bias else None

    def entries(self, *names: str) -> Entries:
        """One projection of the checkpoint for each of `parts`, in their order."""
        return self.slices(names, self.parts)

    def fused_entries(self, name: str) -> Entries:
        """One projection of the checkpoint that stacks them whole, one after the other."""
        return self.slices([name] * len(self.parts), stacked(self.parts))

    def slices(self, names: Sequence[str], parts: list[RowShard]) -> Entries:
        """Slices of the checkpoint's projections, which are this rank's rows from the first on."""
        size = self.weight.in_features
        projections = [
            Projection(name, (rows.total, size), rows.kept, slice(0, size))
            for name, rows in zip(names, parts, strict=True)
        ]
        entries = self.weight.entries(*projections)
        if self.bias is not None:
            targets = self.bias.split([rows.size for rows in parts])
            for name, rows, target in zip(names, parts, targets, strict=True):
                bias = entries.setdefault(f"{name}.bias", TensorEntry((rows.total,)))
                bias.parts.append(LoadedSlice(target, (rows.kept,)))
        return entries

    def pack(self, packer: WeightPacker) -> None:
        self.weight.pack(packer.linear)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        return context.kernels.linear(x, self.weight.packed, self.bias)


class RowParallelLinear:
    """y = sum over ranks of x W^T, plus b: each rank has the columns for its share of x.

    what: names the input features in the error that they cannot be shared evenly. num_tiles: of the
    inputs, of each of which a rank has a share.
    """

    def __init__(
        self,
        placement: Placement,
        in_features: int,
        out_features: int,
        what: str,
        *,
        bias: bool = False,
        num_tiles: int = 1,
    ) -> None:
        self.tp = placement.tp
        self.num_tiles = num_tiles
        self.columns = RowShard.share(placement, in_features // num_tiles, what)
        self.weight = Weight(placement, out_features, self.columns.size * num_tiles)
        self.bias = placement.empty(out_features) if bias else None

    def entries(self, name: str) -> Entries:
        """The checkpoint's weight, and bias if there is one."""
        num_rows = self.weight.out_features
        shape, rows = (num_rows, self.columns.total * self.num_tiles), slice(0, num_rows)
        entries = self.weight.entries(
            Projection(name, shape, rows, self.columns.kept, self.num_tiles)
        )
        if self.bias is not None:
            entries[f"{name}.bias"] = whole(self.bias)
        return entries

    def pack(self, packer: WeightPacker) -> None:
        self.weight.pack(packer.linear)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        is_alone = self.tp.size == 1  # then the bias is added before the result is rounded
        y = context.kernels.linear(x, self.weight.packed, self.bias if is_alone else None)
        return context.kernels.all_reduce(y, self.tp, None if is_alone else self.bias)


class VocabParallelEmbedding:
    """RowShard of the embedding, or of the head, for token ids from first_token on."""

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int) -> None:
        self.shape = vocab_size, hidden_size
        range_size = -(-vocab_size // placement.tp.size)
        self.first_token = min(placement.tp.rank * range_size, vocab_size)
        self.num_tokens = min(range_size, vocab_size - self.first_token)
        self.weight = Weight(placement, self.num_tokens, hidden_size)

    def entries(self, name: str) -> Entries:
        rows = slice(self.first_token, self.first_token + self.num_tokens)
        return self.weight.entries(Projection(name, self.shape, rows, slice(0, self.shape[1])))

    def pack(self, packer: WeightPacker) -> None:
        self.weight.pack(packer.head)
