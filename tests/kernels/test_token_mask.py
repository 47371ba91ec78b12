"""Masks in sampling kernels: what they forbid is as logits of minus infinity, to the bit."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import TokenPlaces
from tests.kernels.cpu_case import reference_or_backend, runnable_libraries
from tests.kernels.mask_case import MaskedRows, draw_filters, draw_noise, pack

drawn = settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**32)
widths = st.one_of(st.integers(1, 150), st.sampled_from([160, 256, 1009, 2048]))
first_tokens = st.sampled_from([0, 0, 1, 31, 32, 45, 64, 1000])


@pytest.fixture(scope="module", params=["torch", *INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return reference_or_backend(request.param)


@given(seeds, widths, first_tokens, st.sampled_from([0.0, 0.3]))
@drawn
def test_the_best_token_is_that_of_logits_with_minus_infinity(
    kernels: Kernels, seed: int, width: int, first_token: int, spoilt: float
) -> None:
    rows = MaskedRows.draw(seed, 7, width, first_token, spoilt)
    for noise in (None, draw_noise(seed, 7)):
        expected = kernels.best_token(rows.filled_RV, first_token, noise)
        before_RV = rows.logits_RV.clone()
        rows.assert_same(
            kernels.best_token(rows.logits_RV, first_token, noise, mask=rows.mask), expected
        )
        assert torch.equal(rows.logits_RV.view(torch.int32), before_RV.view(torch.int32))


@given(seeds, widths, st.sampled_from([0.0, 0.3]))
@drawn
def test_filters_are_of_what_the_mask_allows(
    kernels: Kernels, seed: int, width: int, spoilt: float
) -> None:
    rows = MaskedRows.draw(seed, 7, width, spoilt=spoilt)
    noise, filters = draw_noise(seed, 7, may_be_greedy=False), draw_filters(seed, 7, width)
    expected = kernels.best_filtered_token(rows.filled_RV, noise, filters)
    before_RV = rows.logits_RV.clone()
    rows.assert_same(
        kernels.best_filtered_token(rows.logits_RV, noise, filters, rows.mask), expected
    )
    assert torch.equal(rows.logits_RV.view(torch.int32), before_RV.view(torch.int32))


@pytest.mark.parametrize("cuts", [(30, 60), (32, 64), (1, 99), (33, 34)])
def test_the_best_of_slices_is_the_best_of_the_whole(
    kernels: Kernels, cuts: tuple[int, int]
) -> None:
    for seed in range(10):
        rows, noise = MaskedRows.draw(seed, 9, 101, spoilt=0.0), draw_noise(seed, 9)
        value, column = kernels.best_token(rows.logits_RV, 0, noise, mask=rows.mask)
        bounds = [0, *cuts, 101]
        parts = [
            kernels.best_token(rows.logits_RV[:, start:end], start, noise, mask=rows.mask)
            for start, end in pairwise(bounds)
        ]
        values = torch.stack([part[0] for part in parts])
        columns = torch.stack([part[1] + bounds[i] for i, part in enumerate(parts)])
        assert torch.equal(values.amax(dim=0), value)
        has_token = column >= 0
        best = columns.gather(0, values.argmax(dim=0)[None])[0]
        assert torch.equal(best[has_token], column[has_token])


def test_tokens_of_masked_rows_go_to_their_places_too(kernels: Kernels) -> None:
    rows = MaskedRows.draw(5, 4, 70, spoilt=0.0)
    table = torch.full((4, 3), -7, dtype=torch.int32)
    places = TokenPlaces(table, torch.tensor([3, 0, 2, 1]), torch.tensor([0, 2, 1, 1]))
    _, column = kernels.best_token(rows.logits_RV, 0, None, places, rows.mask)
    assert torch.equal(table[places.rows_R, places.positions_R].long(), column)


def test_a_mask_of_some_rows_is_theirs() -> None:
    rows, chosen = MaskedRows.draw(2, 8, 100, spoilt=0.0), torch.tensor([6, 0, 3])
    assert (rows.mask.index_R >= 0).any()
    of_chosen = rows.mask.of_rows(chosen).is_allowed(0, 100)
    assert torch.equal(of_chosen, rows.filled_RV[chosen] > -torch.inf)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_logits_of_words_without_a_token_are_not_read(is_greedy: bool) -> None:
    kernels = CpuKernels(next(iter(runnable_libraries().values())))
    page = mmap.PAGESIZE // 4
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    values = np.frombuffer(memory, np.float32)
    values[:] = np.linspace(0.0, 1.0, len(values))
    allowed = np.ones((1, len(values)), bool)
    allowed[:, page : 2 * page] = False
    allowed[:, -1] = False
    mask = TokenMask(pack(allowed, np.random.default_rng(0)), torch.zeros(1, dtype=torch.int32))
    noise = draw_noise(1, 1, may_be_greedy=False)
    noise = replace(noise, temperature_R=noise.temperature_R * (not is_greedy))
    logits_RV = torch.from_numpy(values)[None]
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        middle = ctypes.c_void_p(values.ctypes.data + mmap.PAGESIZE)
        is_closed = libc.mprotect(middle, mmap.PAGESIZE, 0) == 0
        column = int(kernels.best_token(logits_RV, 0, noise, mask=mask)[1])
        os._exit(0 if is_closed and (column == len(values) - 2 or not is_greedy) else 1)
    assert os.waitpid(child, 0)[1] == 0
