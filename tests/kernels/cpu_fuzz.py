"""Runs one library's kernels over shapes of all kinds: python cpu_fuzz.py LIBRARY NUM_ROUNDS.

For a library compiled with AddressSanitizer, whose runtime is preloaded: every operand is an
allocation of exactly its size, with poisoned memory around it, so that the first byte that a kernel
reads or writes beyond it ends the process.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import Tensor

from nanocore.engine_core.drafting.ngram import NgramProposer
from nanocore.engine_core.drafting.suffix import SuffixProposer
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import Library
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Filters, Noise
from nanocore.kernels.step import SharedMemoryGroup
from tests.kernels.cpu_case import PagedCase
from tests.kernels.moe_case import ROUTERS, MoeCase, pack_experts
from tests.logit_edits_reference import draw_row, edit


def exactly(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def linear_layers(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    rows = rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 24, 30, 61, 200])
    in_features = rng.choice([rng.randint(1, 140), 257])
    out_features = rng.choice([64, 128, rng.randint(1, 140)])
    weight = draw(out_features, in_features, dtype=dtype)
    packed = kernels.pack_linear(weight, rng.choice([None, "int8", "int4"]))
    apart = in_features + rng.randint(0, 5)
    # The last row ends where its memory ends.
    x = draw(max(0, rows - 1) * apart + in_features, dtype=dtype)
    x = x.as_strided((rows, in_features), (apart, 1))
    kernels.linear(x, packed, rng.choice([None, draw(out_features, dtype=dtype)]))
    if out_features % 2 == 0:
        bias = rng.choice([None, draw(out_features, dtype=dtype)])
        kernels.gated_linear(x, packed, bias, rng.choice(["silu", "gelu"]))
    kernels.logits(x, packed, rng.choice([0.0, 5.0]))
    token_ids = torch.randint(0, out_features + 5, (rows,))
    embedding = TokenEmbedding(packed, rng.randint(0, 5), rng.choice([1.0, 3.0]), dtype)
    kernels.embedding(token_ids, embedding)


def experts(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    num_experts = rng.randint(1, 9)
    case = MoeCase(
        rng.choice([0, 1, 2, 3, 13, 40]),
        num_experts,
        rng.randint(1, num_experts),
        hidden=rng.choice([64, rng.randint(1, 140)]),
        inner=rng.choice([64, rng.randint(1, 140)]),
        dtype=dtype,
        has_shared=rng.random() < 0.5,
        router=rng.choice(ROUTERS),
    )
    bits, group_size = rng.choice([4, 8]), rng.choice([16, 32, 64, 128])
    stored = rng.choice([case.floats(), case.grouped(bits, group_size, has_zeros=True)])
    is_float = isinstance(stored[0][0], Tensor)
    quantization = rng.choice([None, "int8", "int4"]) if is_float else None
    case.logits[torch.rand(case.logits.shape) < rng.choice([0.0, 0.1])] = rng.choice(
        [torch.nan, torch.inf, -torch.inf, 0.0]
    )
    case.run(kernels, pack_experts(kernels, stored, quantization))


def draw_mask(rng: random.Random, rows: int, vocab_size: int) -> TokenMask | None:
    """Words of nothing, of everything and of some tokens; no more than the vocabulary has."""
    words = torch.randint(-(2**31), 2**31, (rng.choice([0, 1, 3]), -(-vocab_size // 32))).int()
    words[torch.rand(words.shape) < rng.choice([0.0, 0.5])] = rng.choice([0, -1])
    index = torch.randint(-1, len(words), (rows,), dtype=torch.int32)
    return rng.choice([None, TokenMask(words, index)])


def best_tokens(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    """Sampling, with noise, filters and masks or not, and log probabilities.

    Of what may be no numbers.
    """
    rows, width = rng.choice([0, 1, 2, 30]), rng.choice([rng.randint(1, 150), 2000])
    logits = torch.randn(rows, width) * rng.choice([0.0, 0.01, 3.0, 1e38])
    logits[torch.rand(rows, width) < rng.choice([0.0, 0.9])] = -torch.inf
    logits[torch.rand(rows) < 0.2, rng.randrange(width)] = rng.choice([torch.nan, torch.inf])
    noise = Noise(torch.rand(rows).round(), torch.arange(rows), torch.arange(rows))
    first_token = rng.choice([0, rng.randint(0, 40), 64])
    mask = draw_mask(rng, rows, first_token + width)
    kernels.best_token(logits, first_token, rng.choice([None, noise]), mask=mask)
    filters = Filters(
        torch.randint(1, width + 1, (rows,), dtype=torch.int32),
        torch.rand(rows).round(decimals=1),
        torch.rand(rows) * rng.choice([0.0, 0.01]),
    )
    noise = Noise(noise.temperature_R + 0.5, noise.seed_R, noise.position_R)
    kernels.best_filtered_token(logits, noise, filters, draw_mask(rng, rows, width))
    token_ids = torch.randint(-1, width, (rows,))
    num_top = rng.choice([0, 1, 5, rng.randint(1, 300), width])
    kernels.logprobs(logits, token_ids, num_top, rng.choice([None, torch.arange(rows).flip(0)]))


def edited_rows(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    width = rng.choice([1, 2, rng.randint(1, 150)])
    drawn = np.random.default_rng(rng.randrange(1 << 30))
    rows = [draw_row(drawn, width) for _ in range(rng.choice([1, 2, 30]))]
    edit(kernels, torch.randn(len(rows), width), rows)


def single_rows(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    rows, size = rng.choice([0, 1, 2, 3, 50, 300]), rng.randint(1, 150)
    x, weight = draw(rows, size, dtype=dtype), draw(size, dtype=dtype)
    kernels.rms_norm(x, rng.choice([weight, weight.float()]), 1e-6)
    kernels.add_rms_norm(x, draw(rows, size, dtype=dtype), weight, 1e-6)


def sums_of_ranks(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    size = rng.randint(1, 4)
    rows, width = rng.choice([0, 1, 3, 50]), rng.randint(1, 150)
    buffer_bytes = rng.choice([64, 8 * rng.randint(1, 200), 1 << 15])
    counters = torch.full((8 * (size - 1) + 1,), 1 << 40)
    buffers = torch.zeros(2 * size * buffer_bytes, dtype=torch.uint8)
    group = SharedMemoryGroup(rng.randrange(size), size, buffer_bytes, counters, buffers)
    for _ in range(3):
        x, bias = draw(rows, width, dtype=dtype), draw(width, dtype=dtype)
        kernels.all_reduce(x, group, rng.choice([None, bias]))
    kernels.add(draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype))


def attention(kernels: CpuKernels, rng: random.Random, dtype: torch.dtype) -> None:
    num_steps, num_kv_heads = rng.randint(1, 3), rng.randint(1, 3)
    head_dim = rng.choice([16, 32, 48, 64, 80, 96, 112, 128])
    counts = [[rng.choice([0, 1, 1, 2, 5, 17, 64, 65]) for _ in range(num_steps)] for _ in range(4)]
    case = PagedCase(
        [row if any(row) else [1] * num_steps for row in counts],
        block_size=rng.choice([16, 32, 48, 64, 128]),
        num_heads=num_kv_heads * rng.randint(1, 16),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rng.choice([0, 2, 6, 16, head_dim]),
        has_qk_norm=rng.random() < 0.5,
        window=rng.choice([0, 0, 1, 2, 15, 16, 63, 64, 65, 100]),
        softcap=rng.choice([0.0, 5.0]),
        num_padding=rng.randint(0, 2),
        dtype=dtype,
        is_quantized=rng.random() < 0.5,
        seed=rng.randint(0, 1 << 30),
    )
    case.run(kernels)


PARTS = (
    linear_layers, experts, single_rows, sums_of_ranks, attention, best_tokens, edited_rows,
)  # fmt: skip


def drafts(library: Library, rng: random.Random) -> None:
    num_rows, row_size = rng.randint(1, 4), rng.choice([1, 2, 50, 300])
    num_ids = rng.choice([1, 2, 5, 1000])
    table = np.array(
        [[rng.randrange(num_ids) for _ in range(row_size)] for _ in range(num_rows)], np.int32
    )
    shortest = rng.randint(1, 5)
    proposers = (
        NgramProposer(
            library, table, rng.randint(1, 9), prompt_lookup_min=shortest, prompt_lookup_max=5
        ),
        SuffixProposer(
            library,
            table,
            rng.randint(1, 9),
            suffix_decoding_max_tree_depth=24,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_max_cached_requests=rng.choice([0, 1, 5]),
            suffix_decoding_min_token_prob=rng.choice([0.0, 0.4]),
            max_bytes=rng.choice([0, 10_000, 30_000, 1 << 28]),
        ),
    )
    for proposer in proposers:
        for _ in range(6):
            sizes = np.array([rng.randint(1, row_size) for _ in range(num_rows)], np.int64)
            for row in range(num_rows):
                proposer.begin(row, rng.choice("ab"))
            while (sizes <= row_size).all():
                proposer.propose(np.arange(num_rows), sizes, np.full(num_rows, rng.randint(0, 9)))
                sizes += rng.randint(1, 7)
            for row in range(num_rows):
                proposer.end(row, rng.randint(0, row_size), row_size, rng.random() < 0.8)


def main() -> None:
    path, num_rounds = sys.argv[1], int(sys.argv[2])
    library = Library(path, "sanitized")
    backends = [CpuKernels(library, keeps_activations=keeps) for keeps in (False, True)]
    for kernels in backends:
        kernels.memory.take = exactly  # type: ignore[method-assign]
    rng = random.Random(0)
    torch.manual_seed(0)
    for i in range(num_rounds):
        kernels = backends[i % 2]
        for dtype in (torch.float32, torch.bfloat16):
            for part in PARTS:
                part(kernels, rng, dtype)
        drafts(library, rng)
    print(f"{num_rounds} rounds")


if __name__ == "__main__":
    main()
