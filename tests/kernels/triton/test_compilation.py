"""All kernels compile for the GPUs we mean, and fit them: Ampere, Ada, Hopper, Blackwell."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compilation import SHARED_BYTES, Usage, measure

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def usages() -> list[Usage]:
    return measure()


@pytest.mark.timeout(600)
def test_every_case_compiles(usages: list[Usage]) -> None:
    assert {usage.capability for usage in usages} == set(SHARED_BYTES)
    compiled = {(usage.case, usage.capability) for usage in usages}
    assert len(usages) == len(compiled), "two cases have one name"


def test_shared_memory_fits(usages: list[Usage]) -> None:
    assert [u for u in usages if u.shared_bytes > SHARED_BYTES[u.capability]] == []


def test_kernels_take_no_more_shared_memory_than_their_tiles_are_chosen_by(
    usages: list[Usage],
) -> None:
    assert [u for u in usages if u.shared_bytes > u.max_shared_bytes] == []


def test_no_registers_are_spilled_beyond_what_a_case_says(usages: list[Usage]) -> None:
    assert [u for u in usages if u.spill_bytes > u.max_spill_bytes] == []


def test_products_are_those_of_tensor_cores(usages: list[Usage]) -> None:
    assert [u for u in usages if u.missing_instruction is not None] == []
