"""Log probabilities, native and by torch, against a log_softmax in float64 and a full sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import LogprobTensors
from nanocore.kernels.torch import sampling as torch_sampling
from nanocore.kernels.torch.backend import TorchKernels
from tests.campaign import examples
from tests.kernels.cpu_case import reference_or_backend

ALL = 2**31 - 1


@pytest.fixture(scope="module", params=["torch", *INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return reference_or_backend(request.param)


def by_sort(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> LogprobTensors:
    """Python's stable sort, which keeps the smaller of equal ones first."""
    exact_RV = logits_RV.double().log_softmax(dim=1)
    order_RV = (logits_RV + 0.0).sort(dim=1, descending=True, stable=True).indices
    rank_R = (order_RV == token_ids_R[:, None]).int().argmax(dim=1) + 1
    ids_RC = torch.cat((token_ids_R[:, None], order_RV[:, :num_top]), dim=1)
    return LogprobTensors(ids_RC.int(), exact_RV.gather(1, ids_RC).float(), rank_R.int())


def check(said: LogprobTensors, right: LogprobTensors) -> None:
    for name in ("token_ids_NC", "rank_N"):
        assert getattr(said, name).dtype == torch.int32
        assert getattr(said, name).tolist() == getattr(right, name).tolist()
    assert said.logprobs_NC.dtype == torch.float32
    # To a few units in the last place; below, floats are too small to be told from 0.
    torch.testing.assert_close(said.logprobs_NC, right.logprobs_NC, rtol=5e-7, atol=1e-37)


def draw_logits(rng: np.random.Generator, kind: str, width: int) -> Tensor:
    logits = rng.standard_normal(width).astype(np.float32)
    match kind:
        case "peaked":
            logits *= 30
        case "equal":
            logits[:] = logits[0]
        case "tied":
            logits = np.round(logits * 2) / 2
        case "rising":
            logits.sort()
        case "falling":
            logits = -np.sort(logits)
        case "far apart":
            logits *= 1e30
        case "subnormal":
            logits *= 1e-42
        case "mostly excluded":
            logits[rng.random(width) < 0.97] = -np.inf
            logits[rng.integers(width)] = 1.0
        case "zeros of both signs":
            logits = np.where(logits > 0, np.float32(0.0), np.float32(-0.0))
    return torch.from_numpy(np.ascontiguousarray(logits))


KINDS = ("normal", "peaked", "equal", "tied", "rising", "falling", "far apart", "subnormal",
         "mostly excluded", "zeros of both signs")  # fmt: skip


@given(
    st.integers(0, 2**32),
    st.one_of(st.integers(1, 70), st.sampled_from([1030, 5003])),
    st.one_of(st.integers(0, 40), st.sampled_from([600, ALL])),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
)
@settings(
    deadline=None,
    max_examples=examples(100),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(0, 1, 0, ["normal"])
@example(0, 1, 5, ["normal"])
@example(0, 2000, 3, list(KINDS))
@example(0, 2000, 0, list(KINDS))
@example(0, 2000, ALL, list(KINDS))
@example(0, 33, 33, list(KINDS))
@example(0, 33, 32, list(KINDS))
def test_they_are_those_of_a_softmax_in_double_and_of_a_sort(
    kernels: Kernels, seed: int, width: int, num_top: int, kinds: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    logits_RV = torch.stack([draw_logits(rng, kind, width) for kind in kinds])
    token_ids_R = torch.from_numpy(rng.integers(0, width, len(kinds)))
    before_RV = logits_RV.clone()
    said = kernels.logprobs(logits_RV, token_ids_R, num_top)
    check(said, by_sort(logits_RV, token_ids_R, min(num_top, width)))
    assert torch.equal(logits_RV, before_RV)


def test_a_vocabulary_of_real_size(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(6, 150_001, generator=generator).bfloat16().float()
    logits_RV *= torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0, 30.0])[:, None]
    token_ids_R = torch.tensor([0, 150_000, 77, 3, 100_000, 5])
    for num_top in (0, 20, ALL):
        said = kernels.logprobs(logits_RV, token_ids_R, num_top)
        check(said, by_sort(logits_RV, token_ids_R, min(num_top, 150_001)))


def test_where_one_token_is_almost_certain_the_digits_are_kept(kernels: Kernels) -> None:
    logits_RV = torch.full((1, 1000), -20.0)
    logits_RV[0, 7] = 5.0
    said = kernels.logprobs(logits_RV, torch.tensor([7]), 1)
    exact = -np.log1p(999 * np.exp(-25.0))
    assert said.logprobs_NC[0].tolist() == pytest.approx([exact] * 2, rel=1e-6)
    assert -2e-8 < exact < 0


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS, indirect=True)
@pytest.mark.parametrize("width", [16, 77, 3000])
def test_a_row_says_the_same_bits_whatever_its_neighbours_are(kernels: Kernels, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_RV = torch.randn(40, width, generator=generator) * 4
    token_ids_R = torch.randint(width, (40,), generator=generator)
    together = kernels.logprobs(logits_RV, token_ids_R, 9)
    apart = torch.zeros(40, width + 3)[:, :width]  # rows that lie at other addresses
    apart.copy_(logits_RV)
    for row in range(40):
        alone = kernels.logprobs(apart[row : row + 1], token_ids_R[row : row + 1], 9)
        assert torch.equal(alone.logprobs_NC[0], together.logprobs_NC[row])
        assert torch.equal(alone.token_ids_NC[0], together.token_ids_NC[row])
        assert alone.rank_N[0] == together.rank_N[row]
    fewer = kernels.logprobs(logits_RV, token_ids_R, 2)
    assert torch.equal(fewer.logprobs_NC, together.logprobs_NC[:, :3])


@pytest.mark.parametrize("num_top", [0, 3, 200, ALL])
def test_rows_without_a_token_do_no_harm_to_others(kernels: Kernels, num_top: int) -> None:
    logits_RV = torch.randn(7, 300, generator=torch.Generator().manual_seed(3))
    token_ids_R = torch.tensor([5, -1, 6, -1, 7, -1, 8])
    right = by_sort(logits_RV, token_ids_R.clamp(min=0), min(num_top, 300))
    logits_RV[1] = torch.nan
    logits_RV[3, ::2] = -torch.nan
    logits_RV[5] = -torch.inf
    said = kernels.logprobs(logits_RV, token_ids_R, num_top)
    rows = slice(0, None, 2)
    check(
        LogprobTensors(said.token_ids_NC[rows], said.logprobs_NC[rows], said.rank_N[rows]),
        LogprobTensors(right.token_ids_NC[rows], right.logprobs_NC[rows], right.rank_N[rows]),
    )


def test_some_rows_in_any_order_say_what_they_do_among_all(kernels: Kernels) -> None:
    logits_RV = torch.randn(9, 77, generator=torch.Generator().manual_seed(3))
    index_N = torch.tensor([7, 0, 7, 3])
    token_ids_N = torch.tensor([5, 6, 70, 7])
    said = kernels.logprobs(logits_RV, token_ids_N, 4, index_N)
    check(said, by_sort(logits_RV[index_N], token_ids_N, 4))
    every_other_N = torch.tensor([7, 1, 0, 1, 7, 1, 3, 1])[::2]
    said = kernels.logprobs(logits_RV, token_ids_N, 4, every_other_N)
    check(said, by_sort(logits_RV[every_other_N], token_ids_N, 4))


def test_no_rows_say_nothing(kernels: Kernels) -> None:
    said = kernels.logprobs(torch.zeros(0, 50), torch.zeros(0, dtype=torch.int64), 4)
    assert said.token_ids_NC.shape == said.logprobs_NC.shape == (0, 5)
    assert said.rank_N.shape == (0,)


def test_a_few_rows_at_a_time_say_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = torch.randn(10, 300, generator=torch.Generator().manual_seed(3))
    token_ids_R = torch.arange(10)
    monkeypatch.setattr(torch_sampling, "_MAX_VALUES", 900)
    said = TorchKernels().logprobs(logits_RV, token_ids_R, 5)
    check(said, by_sort(logits_RV, token_ids_R, 5))
