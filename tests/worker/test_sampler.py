"""However the vocabulary is split, the tokens are those of the reference on whole rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanocore.kernels import gumbel_noise
from nanocore.kernels.candidates import logits_of, make_candidates, token_ids_of
from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.sampling.columns import SampledRows
from nanocore.worker.sampling.sampler import TokenSampler
from tests.campaign import examples
from tests.logit_edits_reference import draw_row, places_of, sampled_rows
from tests.sampling_reference import (
    Settings,
    make_metadata,
    make_rows,
    sample_whole,
)
from tests.worker.ranks import run_ranks, same_on_every_rank

KERNELS = TorchKernels()
GREEDY: Settings = (0.0, 0, 1.0, 0.0)
PLAIN: Settings = (0.8, 0, 1.0, 0.0)


def positions(logits_RV: Tensor) -> Tensor:
    return torch.arange(len(logits_RV)) * 7


def sample_split(
    logits_RV: Tensor,
    rows: SampledRows,
    size: int,
    kernels: Kernels = KERNELS,
    places: TokenPlaces | None = None,
) -> Tensor:
    vocab_size = logits_RV.shape[1]
    range_size = -(-vocab_size // size)

    def of_rank(tp: Communicator) -> Tensor:
        first = min(tp.rank * range_size, vocab_size)
        columns = logits_RV[:, first : first + range_size].contiguous()
        sampler = TokenSampler(first, vocab_size, tp, kernels)
        return sampler.sample(columns, make_metadata(rows, places or positions(logits_RV)))

    return same_on_every_rank(run_ranks(size, of_rank))


def check(logits_RV: Tensor, rows: list[Settings], size: int, seed: int = 0) -> None:
    sampled = make_rows(rows, logits_RV.shape[1], [seed + i for i in range(len(rows))])
    expected = sample_whole(logits_RV, sampled, positions(logits_RV))
    assert sample_split(logits_RV, sampled, size).tolist() == expected.tolist()


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


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_split_samples_what_whole_rows_do(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 40, 300, 3000]))
    rows = data.draw(st.lists(row_settings, min_size=1, max_size=6))
    size = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 2**53 - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gumbel_noise, "_CACHED_VALUES", data.draw(st.sampled_from([1, 5000, 1 << 18]))
        )
        check(draw_logits(data, len(rows), vocab_size), rows, size, seed)


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
def test_a_vocabulary_of_real_size(row: Settings) -> None:
    vocab_size = 32_003
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    logits *= torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 10.0])[:, None]
    logits = torch.where(torch.arange(6)[:, None] % 2 == 0, logits, logits.bfloat16().float())
    check(logits, [row] * 6, size=4)


def test_equal_logits_on_different_ranks_go_to_the_smallest_ids() -> None:
    logits = torch.zeros(3, 8)
    sampled = make_rows([GREEDY, (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0)], 8)
    assert sample_split(logits, sampled, 2).tolist() == [0, 0, 0]
    logits[:, :5] = -1.0
    assert sample_split(logits, sampled, 3).tolist() == [5, 5, 5]
    logits[:, 5] = -0.0
    assert sample_split(logits, sampled, 3).tolist() == [5, 5, 5]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("vocab_size", [1, 33, 300])
def test_any_split_edits_and_samples_what_whole_rows_do(vocab_size: int, size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = [draw_row(rng, vocab_size) for _ in range(12)]
    sampled, places = sampled_rows(rows, vocab_size), places_of(rows)
    logits_RV = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(1))
    sampler = TokenSampler(0, vocab_size, SingleRank(), KERNELS)
    whole = sampler.sample(logits_RV.clone(), make_metadata(sampled, places))
    assert sample_split(logits_RV, sampled, size, places=places).tolist() == whole.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_column_for_each_rank_is_a_row_for_the_native_kernels(size: int) -> None:
    rows: list[Settings] = [(1.0, 2, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]
    logits_RV = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    sampled = make_rows(rows, 2)
    expected = sample_whole(logits_RV, sampled, positions(logits_RV))
    kernels = select_kernels("auto", torch.device("cpu"))
    assert sample_split(logits_RV, sampled, size, kernels).tolist() == expected.tolist()


def test_rows_send_one_number_each_and_those_that_ask_for_more_their_logits_too() -> None:
    counting = CountingRank()
    rows = [GREEDY, PLAIN, (1.0, 50, 0.9, 0.0)]
    sampler = TokenSampler(0, 5000, counting, TorchKernels())
    sampler.sample(torch.zeros(3, 2500), make_metadata(make_rows(rows, 5000), torch.arange(3)))
    assert counting.gathered == [(3,), (1, 2500)]


def test_rows_that_all_ask_for_more_send_nothing_but_their_logits() -> None:
    counting = CountingRank()
    sampler = TokenSampler(0, 5000, counting, TorchKernels())
    rows = make_rows([(1.0, 50, 0.9, 0.0)] * 2, 5000)
    sampler.sample(torch.zeros(2, 2500), make_metadata(rows, torch.arange(2)))
    assert counting.gathered == [(2, 2500)]


class CountingRank(SingleRank):
    """Records the shapes that are gathered; the other rank has the same."""

    size = 2

    def __init__(self) -> None:
        self.gathered: list[tuple[int, ...]] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(tuple(x.shape))
        return torch.stack((x, x))


class Waits(TorchDispatchMode):
    """Finds operations for which a host would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_a_device_to_sample_processed_rows_of_several_ranks() -> None:
    """Neither where the logits are flat, and top_p needs to look at most of them."""
    rows = make_rows([(1.0, 0, 0.9, 0.0), (1.0, 50, 0.9, 0.1)], 5000)
    metadata = make_metadata(rows, torch.arange(2))
    sampler = TokenSampler(0, 5000, CountingRank(), TorchKernels())
    with Waits():
        sampler.sample_processed(torch.zeros(2, 2500), metadata)


def test_nothing_waits_for_a_device_to_edit_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [draw_row(rng, 300) for _ in range(8)]
    sampling = make_metadata(sampled_rows(rows, 300), places_of(rows)).of_processed()
    assert sampling.index is not None
    assert sampling.edits is not None
    sampler = TokenSampler(0, 300, SingleRank(), TorchKernels())
    with Waits():
        sampler.sample_processed(torch.zeros(len(sampling.index), 300), sampling)


@pytest.mark.parametrize("row", [GREEDY, PLAIN, (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.1)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spoilt_by", [torch.nan, -torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_not_finite_has_no_token_on_any_rank(
    row: Settings, size: int, spoilt_by: float
) -> None:
    logits_RV = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    sampled = make_rows([row] * 4, 300)
    expected = sample_split(logits_RV, sampled, size).tolist()
    logits_RV[1, 0] = logits_RV[2, 250] = spoilt_by
    assert sample_split(logits_RV, sampled, size).tolist() == [expected[0], -1, -1, expected[3]]


@pytest.mark.parametrize("row", [GREEDY, PLAIN, (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.1)])
@pytest.mark.parametrize("size", [1, 3])
def test_a_row_of_minus_infinity_has_no_token_and_a_rank_of_it_takes_no_part(
    row: Settings, size: int
) -> None:
    logits_RV = torch.full((2, 300), -torch.inf)
    logits_RV[1, 200] = -5.0
    sampled = make_rows([row] * 2, 300)
    assert sample_split(logits_RV, sampled, size).tolist() == [-1, 200]


def test_the_order_of_candidates_is_that_of_logits_then_of_smaller_ids() -> None:
    values = torch.tensor([-torch.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0, torch.inf])
    token_ids = torch.tensor([0, 2**31 - 2, 5, 7, 6, 1, 4, 3, 9])
    candidates = make_candidates(values, token_ids)
    assert all(a < b for a, b in pairwise(candidates.tolist()))
    assert torch.equal(logits_of(candidates), values)
    assert token_ids_of(candidates).tolist() == token_ids.tolist()
