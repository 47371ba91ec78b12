"""Layers with states: the reference against torch's and transformers' functions, and native ones
against the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.attention_step import make_metadata
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.states import StateKernels
from nanocore.kernels.torch.backend import TorchKernels
from tests.kernels.state_case import KeptCase, StateCase, conv_case, delta_case

SEEDS = range(25)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("kind", ["short_conv", "silu_conv"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_is_torchs_convolution_however_it_is_cut(seed: int, kind: str) -> None:
    case = conv_case(seed, torch.float32, kind)
    filters = case.filters
    assert filters is not None
    num_taps, channels = filters.taps_LC.shape
    for x, out in zip(case.x, case.run(TorchKernels(), case.cuts(), num_padding=3), strict=True):
        b, c, u = x.chunk(3, 1) if kind == "short_conv" else (x, None, None)
        inputs = F.pad((b if u is None else b * u).t(), (num_taps - 1, 0))
        y = F.conv1d(inputs, filters.taps_LC.t().unsqueeze(1), filters.bias_C, groups=channels).t()
        expected = F.silu(y) if c is None else c * y
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("kind", ["short_conv", "silu_conv"])
@pytest.mark.parametrize("seed", SEEDS)
def test_native_convolutions_are_the_references_and_have_the_same_bits_however_cut(
    seed: int, kind: str, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    check(conv_case(seed, dtype, kind), kernels, 1e-5 if dtype == torch.float32 else 3e-2)


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_native_delta_rules_are_the_references_and_have_the_same_bits_however_cut(
    seed: int, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    check(delta_case(seed, dtype), kernels, 1e-4 if dtype == torch.float32 else 3e-2)


def test_the_reference_keeps_what_follows_a_steps_last_tokens_for_the_first_of_the_next() -> None:
    """A row of three tokens, of which the last two are drafts; one of them is right."""
    kernels, hidden = TorchKernels(), torch.arange(1.0, 7.0).view(6, 1)
    kept = torch.zeros(1, 3, 1)
    step = {"rows_B": torch.zeros(1).long(), "table_rows_B": torch.zeros(1).long()}
    columns = {"num_right_B": torch.tensor([0]), "num_drafts_B": torch.tensor([2])}
    first = replace(make_metadata([(3, 3)], torch.zeros(1, 1).int()), **step, **columns)
    joined = kernels.join_previous(-hidden[:3], hidden[:3], kept, first)
    assert joined.tolist() == [[0, 0], [-2, 1], [-3, 2]]
    kernels.keep_last(hidden[:3], kept, first)
    columns = {"num_right_B": torch.tensor([1]), "num_drafts_B": torch.tensor([0])}
    then = replace(make_metadata([(3, 1)], torch.zeros(1, 1).int()), **step, **columns)
    joined = kernels.join_previous(-hidden[3:4], hidden[3:4], kept, then)
    assert joined.tolist() == [[-4, 2]]


@DTYPES
@pytest.mark.parametrize("seed", range(5))
def test_native_kernels_join_and_keep_what_the_reference_does(
    seed: int, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    KeptCase.draw(seed, 40 + seed, dtype).check(kernels, TorchKernels())


def check(
    case: StateCase, kernels: StateKernels, tolerance: float, num_padding_seqs: int = 0
) -> None:
    """A backend's results are the reference's, and have the same bits when sequences are cut.

    num_padding_seqs: of a backend that needs sequence i in the table's row i.
    """
    whole = case.run(kernels, case.whole)
    others = [case.run(kernels, case.cuts(), 2, num_padding_seqs)]
    for max_drafts in (1, 4):
        rows = {"max_drafts": max_drafts, "has_table_rows": not num_padding_seqs}
        others.append(case.run(kernels, case.cuts(), 1, num_padding_seqs, **rows))
    for one, *same in zip(whole, *others, strict=True):
        assert all(torch.equal(one, other) for other in same)
    case.states.clear()
    for cuts, max_drafts in ((case.whole, 0), (case.cuts(), 4)):
        reference = case.run(TorchKernels(), cuts, max_drafts=max_drafts)
        for one, other in zip(whole, reference, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
        case.states.clear()
