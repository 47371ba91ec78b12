"""All kernels compile for the GPUs we mean, and fit them: Ampere, Hopper, Blackwell."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compilation import CAPABILITIES, Usage, measure

pytestmark = pytest.mark.campaign

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may have; CUDA C++ programming guide, technical specifications."""

RESERVED_BYTES = 1 << 10
"""Of a multiprocessor's shared memory, for each program."""


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


@pytest.mark.parametrize("case", ["prefill", "prefill, head dim 64", "prefill, int8 cache"])
def test_two_programs_of_chunks_fit_a_multiprocessor_of_hopper(
    usages: list[Usage], case: str
) -> None:
    """So that the products of one go on beside the softmax of the other."""
    [usage] = [u for u in usages if (u.case, u.capability) == (case, 90)]
    assert 2 * usage.num_threads * -(-usage.registers // 8) * 8 <= 65536
    assert 2 * (usage.shared_bytes + RESERVED_BYTES) <= SHARED_BYTES[90] + RESERVED_BYTES
