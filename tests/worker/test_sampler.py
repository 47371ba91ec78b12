"""However the vocabulary is split, the tokens are those of the reference on whole rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.kernels import gumbel_noise
from nanocore.kernels.torch_backend import TorchKernels
from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.sampling import sampler
from nanocore.worker.sampling.candidates import (
    logits_of,
    make_candidates,
    no_candidates,
    token_ids_of,
)
from nanocore.worker.sampling.sampler import TokenSampler
from nanocore.worker.sampling.sampling_metadata import SamplingMetadata
from tests.sampling_reference import Settings, make_metadata, sample_whole
from tests.worker.ranks import run_ranks, same_on_every_rank

GREEDY: Settings = (0.0, 0, 1.0, 0.0)
PLAIN: Settings = (0.8, 0, 1.0, 0.0)


def positions(logits_RV: Tensor) -> Tensor:
    return torch.arange(len(logits_RV)) * 7


def sample_split(logits_RV: Tensor, metadata: SamplingMetadata, ends: list[int]) -> Tensor:
    """The tokens that ranks with these columns sample; ends: 0, the ends of all, V."""

    def of_rank(tp: Communicator) -> Tensor:
        columns = logits_RV[:, ends[tp.rank] : ends[tp.rank + 1]].contiguous()
        sampler = TokenSampler(ends[tp.rank], logits_RV.shape[1], tp, TorchKernels())
        return sampler.sample(columns, metadata, positions(logits_RV))

    return same_on_every_rank(run_ranks(len(ends) - 1, of_rank))


def check(logits_RV: Tensor, rows: list[Settings], ends: list[int], seed: int = 0) -> None:
    metadata = make_metadata(rows, logits_RV.shape[1], [seed + i for i in range(len(rows))])
    expected = sample_whole(logits_RV, metadata, positions(logits_RV))
    assert sample_split(logits_RV, metadata, ends).tolist() == expected.tolist()


def draw_logits(data: st.DataObject, num_rows: int, vocab_size: int) -> Tensor:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = rng.choice([0.0, 0.01, 1.0, 5.0, 30.0], (num_rows, 1))
    logits = rng.standard_normal((num_rows, vocab_size)) * scale
    step = data.draw(st.sampled_from([None, 0.125, 2.0]))  # coarse steps: many equal logits
    if step is not None:
        logits = np.round(logits / step) * step
    logits[rng.random(logits.shape) < data.draw(st.sampled_from([0.0, 0.3, 0.99]))] = -np.inf
    # Every row has a token, as every model's has.
    logits[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = scale[:, 0]
    return torch.from_numpy(logits.astype(np.float32))


row_settings = st.one_of(
    st.sampled_from([GREEDY, PLAIN]),
    st.tuples(
        st.sampled_from([0.1, 0.7, 1.0, 2.5]),
        st.sampled_from([0, 1, 2, 3, 20, 400, 10_000]),
        st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
        st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_samples_what_whole_rows_do(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 40, 300, 3000]))
    rows = data.draw(st.lists(row_settings, min_size=1, max_size=6))
    size = data.draw(st.integers(1, 4))
    cuts = st.lists(st.integers(0, vocab_size), min_size=size - 1, max_size=size - 1).map(sorted)
    ends = [0, *data.draw(cuts), vocab_size]
    seed = data.draw(st.integers(0, 2**53 - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_NUM_CANDIDATES", data.draw(st.sampled_from([1, 2, 4, 256])))
        patch.setattr(
            gumbel_noise, "_CACHED_VALUES", data.draw(st.sampled_from([1, 5000, 1 << 18]))
        )
        check(draw_logits(data, len(rows), vocab_size), rows, ends, seed)


@pytest.mark.parametrize(
    "row",
    [
        GREEDY,
        PLAIN,
        (1.0, 50, 0.9, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 5000, 1.0, 0.0),
        (1.0, 0, 1.0, 0.01),
        (1.0, 0, 0.99, 0.001),
        (1.3, 1000, 0.95, 0.05),
    ],
)
def test_a_vocabulary_of_real_size_that_needs_widening(row: Settings) -> None:
    vocab_size = 32_003
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    logits *= torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 10.0])[:, None]
    logits = torch.where(torch.arange(6)[:, None] % 2 == 0, logits, logits.bfloat16().float())
    per_rank = -(-vocab_size // 4)
    check(logits, [row] * 6, [min(i * per_rank, vocab_size) for i in range(5)])


def test_equal_logits_on_different_ranks_go_to_the_smallest_ids() -> None:
    logits = torch.zeros(3, 8)
    rows = [GREEDY, (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0)]
    assert sample_split(logits, make_metadata(rows, 8), [0, 3, 8]).tolist() == [0, 0, 0]
    logits[:, :5] = -1.0
    assert sample_split(logits, make_metadata(rows, 8), [0, 6, 7, 8]).tolist() == [5, 5, 5]
    logits[:, 5] = -0.0
    assert sample_split(logits, make_metadata(rows, 8), [0, 6, 7, 8]).tolist() == [5, 5, 5]


def test_rows_whose_top_k_is_known_to_suffice_take_one_exchange() -> None:
    """top_k of 50 among equal logits is decided by ids; nothing is looked at twice."""
    counting = CountingRank()
    rows = [(1.0, 50, 0.9, 0.0), (1.0, 20, 1.0, 0.1)]
    zeros = torch.zeros(2, 5000)
    sample_on(counting, zeros, make_metadata(rows, 5000))
    assert counting.gathered == [(2, 51)]


def test_greedy_and_plain_rows_send_one_number_each() -> None:
    counting = CountingRank()
    zeros = torch.zeros(2, 5000)
    sample_on(counting, zeros, make_metadata([GREEDY, PLAIN], 5000))
    assert counting.gathered == [(2,)]


def test_only_rows_that_are_undecided_are_widened() -> None:
    counting = CountingRank()
    logits = torch.zeros(3, 5000)
    logits[0, 7] = logits[2, 9] = 30.0
    metadata = make_metadata([(1.0, 0, 0.9, 0.0)] * 3, 5000)
    sample_on(counting, logits, metadata)
    widened = [shape[0] for shape in counting.gathered if len(shape) == 2]
    assert widened == [3, 1]


class CountingRank(SingleRank):
    """Records the shapes that are gathered; the other rank has no tokens."""

    size = 2

    def __init__(self) -> None:
        self.gathered: list[tuple[int, ...]] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(tuple(x.shape))
        other = torch.zeros_like(x)
        if len(x.shape) == 2:  # candidates, and the bound below which there may be more
            other = no_candidates((len(x), x.shape[1]), x.device)
            other[:, -1] = torch.iinfo(x.dtype).min
        elif x.dtype == torch.int64 and len(x) > 1:
            other = no_candidates((len(x),), x.device)
        return torch.stack((x, other))


def sample_on(rank: Communicator, logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    sampler = TokenSampler(0, logits_RV.shape[1], rank, TorchKernels())
    return sampler.sample(logits_RV, metadata, positions(logits_RV))


@pytest.mark.parametrize("row", [GREEDY, PLAIN, (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.1)])
@pytest.mark.parametrize("ends", [[0, 300], [0, 100, 100, 300]])
@pytest.mark.parametrize("spoilt_by", [torch.nan, -torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_not_finite_has_no_token_on_any_rank(
    row: Settings, ends: list[int], spoilt_by: float
) -> None:
    logits_RV = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    metadata = make_metadata([row] * 4, 300)
    expected = sample_split(logits_RV, metadata, ends).tolist()
    logits_RV[1, 0] = logits_RV[2, 250] = spoilt_by
    assert sample_split(logits_RV, metadata, ends).tolist() == [expected[0], -1, -1, expected[3]]


@pytest.mark.parametrize("row", [GREEDY, PLAIN, (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.1)])
@pytest.mark.parametrize("ends", [[0, 300], [0, 100, 100, 300]])
def test_a_row_of_minus_infinity_has_no_token_and_a_rank_of_it_takes_no_part(
    row: Settings, ends: list[int]
) -> None:
    logits_RV = torch.full((2, 300), -torch.inf)
    logits_RV[1, 200] = -5.0
    metadata = make_metadata([row] * 2, 300)
    assert sample_split(logits_RV, metadata, ends).tolist() == [-1, 200]


def test_the_order_of_candidates_is_that_of_logits_then_of_smaller_ids() -> None:
    values = torch.tensor([-torch.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0, torch.inf])
    token_ids = torch.tensor([0, 2**31 - 2, 5, 7, 6, 1, 4, 3, 9])
    candidates = make_candidates(values, token_ids)
    assert all(a < b for a, b in pairwise(candidates.tolist()))
    assert torch.equal(logits_of(candidates), values)
    assert token_ids_of(candidates).tolist() == token_ids.tolist()
