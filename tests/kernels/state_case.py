"""Sequences whose states lie in blocks of which some have no memory, cut into steps at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.states import ConvFilters, DeltaRule, StateCache, StateKernels
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, StateSpec

NO_STATE = -1

Layer = Callable[[StateKernels, Tensor, StateCache, AttentionMetadata], Tensor]
"""Results of a step's tokens."""


@dataclass
class StateCase:
    """Sequences through one layer. x: of each, [tokens, width]. spec: what the layer keeps.

    states: of each sequence, after each of its tokens what the layer should keep, if that is known
    to the bit; in a run without it what was kept first is expected again. filters: a convolution's.
    """

    x: list[Tensor]
    spec: StateSpec
    layer: Layer
    block_size: int
    seed: int
    states: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    filters: ConvFilters | None = None

    @property
    def whole(self) -> list[list[int]]:
        """One step for each sequence's tokens."""
        return [[len(x)] for x in self.x]

    def cuts(self) -> list[list[int]]:
        """Numbers of tokens of each sequence's steps: many of one token, some of many."""
        rng, cuts = random.Random(self.seed + 1), []
        for x in self.x:
            counts: list[int] = []
            while (left := len(x) - sum(counts)) > 0:
                counts.append(min(left, rng.choice([1, 1, 2, 3, 5, 16, 17, 40])))
            cuts.append(counts)
        return cuts

    def run(
        self,
        kernels: StateKernels,
        cuts: list[list[int]],
        num_padding: int = 0,
        num_padding_seqs: int = 0,
        max_drafts: int = 0,
        has_table_rows: bool = False,
    ) -> list[Tensor]:
        """Outputs of each sequence. Unused memory is NaN; what is kept, and where, is checked.

        num_padding: tokens of no sequence. num_padding_seqs: sequences of length 0 with a token.
        max_drafts: steps end with so many, or fewer; any number may be right. has_table_rows:
        the sequences' rows in the block table are not the first ones.
        """
        rng, device = random.Random(self.seed + 2), self.x[0].device
        tables = [[NO_STATE] * -(-len(x) // self.block_size) for x in self.x]
        num_blocks, num_rows = sum(map(len, tables)) + 1, len(self.x) + 2
        cache = _cache(self.spec, num_blocks, self.block_size, (num_rows, max_drafts), device)
        free = list(range(num_blocks))
        rng.shuffle(free)
        rows = rng.sample(range(len(self.x) + 2), len(self.x))
        done, outputs = [0] * len(self.x), [list[Tensor]() for _ in self.x]
        right = [0] * len(self.x)
        for step in range(max(map(len, cuts))):
            left = {i: len(x) - done[i] for i, x in enumerate(self.x) if len(x) > done[i]}
            known = {i: min(cuts[i][step], n) for i, n in left.items() if step < len(cuts[i])}
            drafted, were_right = dict.fromkeys(known, 0), right[:]
            for i, n in known.items() if max_drafts else ():
                drafted[i] = rng.randint(0, min(max_drafts, left[i] - n))
                right[i] = rng.randint(0, drafted[i])
            counts = {i: n + drafted[i] for i, n in known.items()}
            taking = sorted(known, key=lambda i: counts[i] > 1)  # decodes first
            if not taking:
                break
            for i in taking:
                end = done[i] + counts[i]
                for block in range(done[i] // self.block_size, -(-end // self.block_size)):
                    is_end = block >= (done[i] + known[i] - 1) // self.block_size
                    if tables[i][block] == NO_STATE and (is_end or rng.random() < 0.5):
                        tables[i][block] = free.pop()
            metadata = self._metadata(
                tables,
                rows if has_table_rows else None,
                [(i, done[i] + counts[i], counts[i]) for i in taking],
                num_padding,
                num_padding_seqs,
            )
            if max_drafts:
                nothing = [0] * num_padding_seqs
                metadata = replace(
                    metadata,
                    rows_B=_ints([rows[i] for i in taking] + nothing, device).long(),
                    num_right_B=_ints([were_right[i] for i in taking] + nothing, device),
                    num_drafts_B=_ints([drafted[i] for i in taking] + nothing, device),
                )
            x, num_good = [], {i: known[i] + (right[i] if max_drafts else 0) for i in taking}
            for i in taking:
                wrong = torch.randn(counts[i] - num_good[i], self.x[i].shape[1])
                x += [self.x[i][done[i] : done[i] + num_good[i]], wrong.to(self.x[i])]
            padding = x[0].new_full((num_padding + num_padding_seqs, x[0].shape[1]), torch.nan)
            out = self.layer(kernels, torch.cat([*x, padding]), cache, metadata)
            num_tokens = sum(counts.values())
            assert not out[num_tokens:].any(), "padding is zero"
            parts = out[:num_tokens].split([counts[i] for i in taking])
            for i, part in zip(taking, parts, strict=True):
                before = done[i] - were_right[i]
                self._check_states(cache, tables[i], i, before, done[i] + known[i])
                outputs[i].append(part[: num_good[i]])
                done[i] += num_good[i]
                if cache.drafts_RKI is not None:
                    cache.drafts_RKI[rows[i], right[i] :] = float("nan")
        assert done == [len(x) for x in self.x]
        for block in free:
            for kept in _parts(cache):
                assert kept[block].isnan().all(), "memory of nobody was written"
        return [torch.cat(parts) for parts in outputs]

    def _metadata(
        self,
        tables: list[list[int]],
        rows: list[int] | None,
        seqs: list[tuple[int, int, int]],
        num_padding: int,
        num_padding_seqs: int,
    ) -> AttentionMetadata:
        """seqs: number, length and tokens of the step's. rows: in the table; None: the first."""
        width, device = max(map(len, tables)), self.x[0].device
        ids = [tables[i] + [0] * (width - len(tables[i])) for i, *_ in seqs]
        lengths = [(length, count) for _, length, count in seqs] + [(0, 1)] * num_padding_seqs
        ids_BM = _ints(ids + [[0] * width] * num_padding_seqs, device)
        if rows is None:
            return make_metadata(lengths, ids_BM, num_padding=num_padding)
        assert not num_padding_seqs, "steps of the host are not padded"
        table_rows = torch.tensor([rows[i] for i, *_ in seqs])
        table = torch.full((max(rows) + 1, width), 2**30, dtype=torch.int32)
        table[table_rows] = ids_BM
        return make_metadata(lengths, table, num_padding=num_padding, table_rows_B=table_rows)

    def _check_states(
        self, cache: StateCache, table: list[int], i: int, start: int, end: int
    ) -> None:
        """Blocks with memory hold what the next token needs."""
        for block in range(start // self.block_size, -(-end // self.block_size)):
            stop = min((block + 1) * self.block_size, end)
            if table[block] != NO_STATE and stop > start:
                kept = [part[table[block]].clone() for part in _parts(cache)]
                expected = self.states.setdefault((i, stop), kept)
                for one, other in zip(kept, expected, strict=True):
                    assert torch.equal(one, other)


def _ints(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def conv_case(
    seed: int, dtype: torch.dtype, kind: str, most_tokens: int = 70, device: str = "cpu"
) -> StateCase:
    """Convolutions of a kind of layer: "short_conv" or "silu_conv"."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    channels, num_taps = rng.choice([3, 16, 64, 100, 160]), rng.choice([2, 3, 4, 7, 8])

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    filters = ConvFilters(
        drawn(num_taps, channels), drawn(channels) if rng.random() < 0.5 else None
    )
    width = 3 * channels if kind == "short_conv" else channels
    lengths = [rng.randint(1, most_tokens) for _ in range(rng.randint(1, 4))]
    x = [drawn(length, width).to(dtype) for length in lengths]
    states = {}
    for i, own in enumerate(x):  # inputs of the filter, zeros before
        inputs = own if kind == "silu_conv" else own.chunk(3, 1)[0] * own.chunk(3, 1)[2]
        inputs = torch.cat((inputs.new_zeros(num_taps - 1, channels), inputs))
        states |= {(i, n): [inputs[n : n + num_taps - 1]] for n in range(1, len(own) + 1)}

    def layer(
        kernels: StateKernels, x: Tensor, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        return getattr(kernels, kind)(x, filters, cache, metadata)

    spec = StateSpec((num_taps - 1, channels), dtype, width)
    return StateCase(x, spec, layer, rng.choice([1, 2, 4, 16]), seed, states, filters)


def delta_case(
    seed: int,
    dtype: torch.dtype,
    most_tokens: int = 70,
    dims: tuple[int, int] | None = None,
    device: str = "cpu",
) -> StateCase:
    """A delta rule; decays from nearly none to nearly all. x: heads of q, k and v; b and a.

    dims: of keys and of values; None: drawn from those that native kernels take.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_keys, per_key = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    drawn_dims = rng.choice([16, 32, 64]), rng.choice([32, 64])
    key_dim, value_dim = dims or drawn_dims
    num_heads = num_keys * per_key
    num_channels = 2 * num_keys * key_dim + num_heads * value_dim

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rule = DeltaRule(
        num_keys, key_dim, value_dim, -(2 * drawn(num_heads)).exp(), 3 * drawn(num_heads),
        is_tiled=rng.random() < 0.5,
    )  # fmt: skip
    lengths = [rng.randint(1, most_tokens) for _ in range(rng.randint(1, 3))]
    x = [drawn(length, num_channels + 2 * num_heads).to(dtype) for length in lengths]

    def layer(
        kernels: StateKernels, x: Tensor, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        qkv, gates = x[:, :num_channels], x[:, num_channels:]
        return kernels.delta_rule(qkv, gates, rule, cache, metadata)

    num_inputs = 2 * (num_channels + num_heads)
    spec = StateSpec((3, 5), dtype, num_inputs, (num_heads, key_dim, value_dim))
    return StateCase(x, spec, layer, rng.choice([1, 2, 4, 16]), seed)


def _parts(cache: StateCache) -> list[Tensor]:
    """What the layer under test keeps: the matrices, or else the inputs of a convolution."""
    return [cache.conv_NLC if cache.delta_N is None else cache.delta_N]


def _cache(
    spec: StateSpec,
    num_blocks: int,
    block_size: int,
    draft_shape: tuple[int, int],
    device: torch.device,
) -> StateCache:
    """A layer's states between those of two others; all bytes are 255, which is NaN."""
    specs = [StateSpec((3, 5), spec.dtype, 5), spec, StateSpec((1, 7), spec.dtype, 7)]
    layout = KVLayout(specs, KVCacheFormat(spec.dtype), block_size)
    memory = KVMemory(layout, num_blocks, device)
    memory.blocks[0].fill_(255)
    cache = memory.layers(draft_shape)[1]
    assert isinstance(cache, StateCache)
    if cache.drafts_RKI is not None:
        cache.drafts_RKI.fill_(float("nan"))
    return cache


@dataclass
class KeptCase:
    """A step of sequences that keep hidden states of their last tokens.

    x, hidden: [T, E]. kept: of rows; those of one are zeros. Two sequences have no tokens.
    """

    x: Tensor
    hidden: Tensor
    kept: Tensor
    metadata: AttentionMetadata

    @classmethod
    def draw(cls, seed: int, size: int, dtype: torch.dtype, device: str = "cpu") -> KeptCase:
        rng = random.Random(seed)
        drafts = [rng.randint(0, 3) for _ in range(6)]
        counts = [1 + drafted + rng.choice([0, 0, 7]) for drafted in drafts]
        counts[2] = counts[4] = drafts[2] = drafts[4] = 0
        generator = torch.Generator().manual_seed(seed)
        x, hidden = torch.randn(2, sum(counts), size, generator=generator).to(dtype).to(device)
        kept = torch.randn(9, 4, size, generator=generator).to(dtype).to(device)
        rows = rng.sample(range(9), 6)
        kept[rows[1]] = 0
        metadata = make_metadata([(20 + n, n) for n in counts], torch.zeros(6, 2).int())
        columns = drafts, [rng.randint(0, 3) for _ in range(6)]
        num_drafts_B, num_right_B = (_ints(column, torch.device(device)) for column in columns)
        metadata = replace(
            metadata,
            rows_B=(rows_B := torch.tensor(rows, device=device)),
            table_rows_B=rows_B,
            query_start_A=metadata.query_start_A.to(device),
            seq_lens_B=metadata.seq_lens_B.to(device),
            num_right_B=num_right_B,
            num_drafts_B=num_drafts_B,
        )
        return cls(x, hidden, kept, metadata)

    def check(self, kernels: StateKernels, reference: StateKernels) -> None:
        """Copies are equal to the bit."""
        both = []
        for one in (kernels, reference):
            kept = self.kept.clone()
            joined = one.join_previous(self.x, self.hidden, kept, self.metadata)
            assert torch.equal(kept, self.kept)
            one.keep_last(self.hidden, kept, self.metadata)
            both.append((joined, kept))
        (joined, kept), expected = both
        assert torch.equal(joined, expected[0])
        assert torch.equal(kept, expected[1])
        assert not torch.equal(kept, self.kept)
        starts = self.metadata.query_start_A.tolist()
        assert not joined[starts[1]].any()
        assert joined.any(1).sum() == len(joined) - 1
