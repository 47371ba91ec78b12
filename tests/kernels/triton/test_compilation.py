"""All kernels compile for the GPUs we mean, and fit them: Ampere, Ada, Hopper, Blackwell."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compilation import CAPABILITIES, SHARED_BYTES, Usage, measure

pytestmark = pytest.mark.campaign

RESERVED_BYTES = 1 << 10
"""Of a multiprocessor's shared memory, for each program."""


@pytest.fixture(scope="module")
def usages() -> list[Usage]:
    return measure()


@pytest.mark.timeout(1200)
def test_every_case_compiles_for_every_capability_that_it_is_for(usages: list[Usage]) -> None:
    names = [(usage.case, usage.capability) for usage in usages]
    assert len(names) == len(set(names)), "two cases have one name"
    assert {capability for _, capability in names} == SHARED_BYTES.keys()
    plain = [usage.capability for usage in usages if usage.case == "prefill"]
    assert plain == list(CAPABILITIES)


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


def test_loops_of_products_wait_for_no_load_and_load_no_single_bytes(usages: list[Usage]) -> None:
    """Keys, values, their scales and blocks' ids are copied to shared memory ahead of use."""
    assert [u for u in usages if u.slow_loads] == []


def test_kernels_that_begin_early_touch_nothing_before_they_have_waited(
    usages: list[Usage],
) -> None:
    early = [usage for usage in usages if usage.may_begin_early]
    assert {usage.capability for usage in early} == {90, 100}
    assert len(early) > len(usages) / 3
    assert [u for u in early if u.accesses_early] == []


@pytest.mark.parametrize(
    "case", ["prefill", "prefill, head dim 64", "prefill, int8 cache, head dim 128"]
)
def test_two_programs_of_chunks_fit_a_multiprocessor_of_hopper(
    usages: list[Usage], case: str
) -> None:
    [usage] = [u for u in usages if (u.case, u.capability) == (case, 90)]
    assert 2 * usage.num_threads * -(-usage.registers // 8) * 8 <= 65536
    assert 2 * (usage.shared_bytes + RESERVED_BYTES) <= SHARED_BYTES[90] + RESERVED_BYTES
