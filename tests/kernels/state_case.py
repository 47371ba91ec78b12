"""Sequences whose states lie in blocks of which some have no memory, cut into steps at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.states import ConvFilters, StateCache, StateKernels
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, StateSpec

NO_STATE = -1


@dataclass(frozen=True)
class ConvCase:
    """Sequences of these lengths through one layer. x: of each, [tokens, 3 C]."""

    filters: ConvFilters
    x: list[Tensor]
    block_size: int
    seed: int

    @classmethod
    def draw(cls, seed: int, dtype: torch.dtype, most_tokens: int = 70) -> ConvCase:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        channels, num_taps = rng.choice([3, 16, 64, 100, 160]), rng.choice([2, 3, 4, 7, 8])

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        bias_C = drawn(channels) if rng.random() < 0.5 else None
        lengths = [rng.randint(1, most_tokens) for _ in range(rng.randint(1, 4))]
        x = [drawn(length, 3 * channels).to(dtype) for length in lengths]
        return cls(
            ConvFilters(drawn(num_taps, channels), bias_C), x, rng.choice([1, 2, 4, 16]), seed
        )

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
        self, kernels: StateKernels, cuts: list[list[int]], num_padding: int = 0
    ) -> list[Tensor]:
        """Outputs of each sequence. Unused memory is NaN; what is kept, and where, is checked."""
        rng = random.Random(self.seed + 2)
        channels, dtype = self.filters.taps_LC.shape[1], self.x[0].dtype
        tables = [[NO_STATE] * -(-len(x) // self.block_size) for x in self.x]
        num_blocks = sum(map(len, tables)) + 1
        cache = _cache(channels, len(self.filters.taps_LC) - 1, dtype, num_blocks, self.block_size)
        free = list(range(num_blocks))
        rng.shuffle(free)
        done, outputs = [0] * len(self.x), [list[Tensor]() for _ in self.x]
        for step in range(max(map(len, cuts))):
            taking = [i for i, counts in enumerate(cuts) if step < len(counts)]
            taking.sort(key=lambda i: cuts[i][step] > 1)  # decodes first
            for i in taking:
                start, end = done[i], done[i] + cuts[i][step]
                for block in range(start // self.block_size, -(-end // self.block_size)):
                    is_last = block == (end - 1) // self.block_size
                    if tables[i][block] == NO_STATE and (is_last or rng.random() < 0.5):
                        tables[i][block] = free.pop()
            counts = [cuts[i][step] for i in taking]
            width = max(map(len, tables))
            table = torch.tensor(
                [tables[i] + [0] * (width - len(tables[i])) for i in taking], dtype=torch.int32
            )
            seqs = [(done[i] + n, n) for i, n in zip(taking, counts, strict=True)]
            metadata = make_metadata(seqs, table, num_padding=num_padding)
            x = [self.x[i][done[i] : done[i] + n] for i, n in zip(taking, counts, strict=True)]
            padding = torch.full((num_padding, 3 * channels), float("nan"), dtype=dtype)
            out = kernels.short_conv(torch.cat([*x, padding]), self.filters, cache, metadata)
            assert not out[sum(counts) :].any(), "padding is zero"
            for i, part in zip(taking, out[: sum(counts)].split(counts), strict=True):
                self._check_states(cache, tables[i], i, done[i], done[i] + len(part))
                outputs[i].append(part)
                done[i] += len(part)
        for block in free:
            assert cache.states_N[block].isnan().all(), "memory of nobody was written"
        return [torch.cat(parts) for parts in outputs]

    def _check_states(
        self, cache: StateCache, table: list[int], i: int, start: int, end: int
    ) -> None:
        """Blocks with memory hold what the next token needs: inputs of the filter, zeros before."""
        b, _, u = self.x[i].chunk(3, 1)
        num_kept = cache.states_N.shape[1]
        inputs = torch.cat((torch.zeros_like(b[:1]).expand(num_kept, -1), b * u))
        for block in range(start // self.block_size, -(-end // self.block_size)):
            stop = min((block + 1) * self.block_size, end)
            if table[block] != NO_STATE:
                assert torch.equal(cache.states_N[table[block]], inputs[stop : stop + num_kept])


def _cache(
    channels: int, num_kept: int, dtype: torch.dtype, num_blocks: int, block_size: int
) -> StateCache:
    """A layer's states between those of two others; all bytes are 255, which is NaN."""
    specs = [
        StateSpec((3, 5), dtype),
        StateSpec((num_kept, channels), dtype),
        StateSpec((1,), dtype),
    ]
    memory = KVMemory(
        KVLayout(specs, KVCacheFormat(dtype), block_size), num_blocks, torch.device("cpu")
    )
    memory.blocks[0].fill_(255)
    cache = memory.layer(1)
    assert isinstance(cache, StateCache)
    return cache
