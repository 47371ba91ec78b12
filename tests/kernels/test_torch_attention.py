"""Paged attention against a dense float64 computation, sequence by sequence."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nanocore.kernels import torch_backend
from nanocore.kernels.backend import AttentionMetadata, select_kernels

HEAD_DIM = 16


class PagedCase:
    """A mixed batch with its KV scattered over shuffled blocks; everything else is garbage."""

    def __init__(
        self, seqs: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int, seed: int
    ) -> None:
        """seqs: (context length including this step, query tokens), decodes first."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        widths = [-(-length // block_size) for length, _ in seqs]
        num_blocks = sum(widths) + 3
        free = list(range(num_blocks))
        rng.shuffle(free)
        self.k_cache = 100 * draw(num_blocks, block_size, kv_heads, HEAD_DIM)
        self.v_cache = 100 * draw(num_blocks, block_size, kv_heads, HEAD_DIM)
        self.block_table = torch.tensor(
            [
                [free.pop() for _ in range(width)]
                + [rng.randrange(num_blocks)] * (max(widths) - width)
                for width in widths
            ],
            dtype=torch.int32,
        )
        self.k = [draw(length, kv_heads, HEAD_DIM) for length, _ in seqs]
        self.v = [draw(length, kv_heads, HEAD_DIM) for length, _ in seqs]
        self.q = [draw(count, heads, HEAD_DIM) for _, count in seqs]
        self.seqs, self.block_size = seqs, block_size

    def slots(self, i: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        blocks = self.block_table[i].long()[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def run(self) -> Tensor:
        kernels = select_kernels("torch", torch.device("cpu"))
        for i, (length, count) in enumerate(self.seqs):  # what earlier steps have written
            past = length - count
            kernels.store_kv(
                self.k[i][:past], self.v[i][:past], self.k_cache, self.v_cache,
                self.slots(i, 0, past),
            )  # fmt: skip
        starts = [0]
        for _, count in self.seqs:
            starts.append(starts[-1] + count)
        lengths = [length for length, _ in self.seqs]
        metadata = AttentionMetadata(
            num_decodes=sum(count == 1 for _, count in self.seqs),
            query_start=starts,
            seq_lens=lengths,
            seq_lens_B=torch.tensor(lengths, dtype=torch.int32),
            block_table_BM=self.block_table,
            slot_mapping_T=torch.cat(
                [self.slots(i, n - c, n) for i, (n, c) in enumerate(self.seqs)]
            ),
        )
        new = [(self.k[i][n - c :], self.v[i][n - c :]) for i, (n, c) in enumerate(self.seqs)]
        kernels.store_kv(
            torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), self.k_cache,
            self.v_cache, metadata.slot_mapping_T,
        )  # fmt: skip
        return kernels.paged_attention(
            torch.cat(self.q), self.k_cache, self.v_cache, metadata, HEAD_DIM**-0.5
        )

    def expected(self) -> Tensor:
        outputs = []
        for q, k, v, (length, count) in zip(self.q, self.k, self.v, self.seqs, strict=True):
            group = q.shape[1] // k.shape[1]
            k64 = k.double().repeat_interleave(group, dim=1)
            v64 = v.double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k64) * HEAD_DIM**-0.5
            future = torch.arange(length) > torch.arange(length - count, length)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v64))
        return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "seqs",
    [
        [(1, 1)],
        [(17, 17)],
        [(16, 16), (32, 16), (33, 16)],
        [(1, 1), (16, 1), (17, 1), (40, 1)],
        [(5, 1), (31, 1), (2, 2), (40, 7), (64, 64), (48, 33)],
    ],
)
def test_mixed_batches_equal_dense_attention(
    seqs: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int
) -> None:
    case = PagedCase(seqs, block_size, heads, kv_heads, seed=len(seqs) + block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_decodes_gathered_in_parts_equal_those_gathered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seqs = [(n, 1) for n in (3, 40, 17, 16, 1)]
    whole = PagedCase(seqs, 4, 4, 2, seed=3).run()
    monkeypatch.setattr(torch_backend, "MAX_GATHERED_TOKENS", 80)
    torch.testing.assert_close(PagedCase(seqs, 4, 4, 2, seed=3).run(), whole)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel backend 'flash'"):
        select_kernels("flash", torch.device("cpu"))
