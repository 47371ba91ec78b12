"""All kernels compile for the GPUs we mean, and fit them: Ampere, Hopper, Blackwell."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compilation import CAPABILITIES, Usage, measure

pytestmark = pytest.mark.campaign

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may have; CUDA C++ programming guide, technical specifications."""


@pytest.fixture(scope="module")
def usages() -> list[Usage]:
    return measure()


@pytest.mark.timeout(300)
def test_every_case_compiles_for_every_capability(usages: list[Usage]) -> None:
    cases = {usage.case for usage in usages}
    assert {(u.case, u.capability) for u in usages} == {(c, n) for c in cases for n in CAPABILITIES}
    assert len(usages) == len(cases) * len(CAPABILITIES), "two cases have one name"


def test_shared_memory_fits(usages: list[Usage]) -> None:
    assert [u for u in usages if u.shared_bytes > SHARED_BYTES[u.capability]] == []


def test_no_registers_are_spilled_beyond_what_a_case_says(usages: list[Usage]) -> None:
    assert [u for u in usages if u.spill_bytes > u.max_spill_bytes] == []


def test_products_are_those_of_tensor_cores(usages: list[Usage]) -> None:
    assert [u for u in usages if u.missing_instruction is not None] == []
