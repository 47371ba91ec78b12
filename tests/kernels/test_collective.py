"""Sums over ranks by the native kernel: the bits of the communicator's, in any company."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.step import RankGroup
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.communication.shared_memory import (
    ShmCommunicator,
    create_group_region,
    progress,
)
from tests.kernels.cpu_case import INSTRUCTION_SETS, runnable_libraries
from tests.worker.ranks import run_ranks, same_on_every_rank

BUFFER_BYTES = 256

Choose = Callable[[int], Kernels]
"""The kernels of a rank."""


def native(instruction_set: str) -> CpuKernels:
    library = runnable_libraries().get(instruction_set)
    if library is None:
        pytest.skip(f"{instruction_set}: not compiled, or not for this machine")
    return CpuKernels(library, cores=sorted(os.sched_getaffinity(0))[:1])


def part_of(rank: int, rows: int, width: int, dtype: torch.dtype, call: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    x = torch.randn(rows, width, generator=generator)
    scale = torch.tensor([1e-39, 1e-3, 1.0, 300.0])
    return (x * scale[torch.randint(4, x.shape, generator=generator)]).to(dtype)


def expected_sum(size: int, *shape: int, dtype: torch.dtype, call: int = 0) -> Tensor:
    total = torch.zeros(shape)
    for rank in range(size):
        total += part_of(rank, *shape, dtype, call)
    return total.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def all_native(name: str) -> Choose:
    return lambda rank: native(name)


def reduced(size: int, choose: Choose, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The sum that all ranks have, each by its kernels; all have the bits that are expected."""
    chosen = [choose(rank) for rank in range(size)]
    results = run_ranks(
        size,
        lambda c: chosen[c.rank].all_reduce(part_of(c.rank, rows, width, dtype), c),
        buffer_bytes=BUFFER_BYTES,
    )
    return same_on_every_rank([bits(x) for x in results])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (0, 4), (3, 40), (70, 31)])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_native_ranks_have_the_bits_of_the_sum_in_the_order_of_ranks(
    name: str, size: int, dtype: torch.dtype, rows: int, width: int
) -> None:
    total = reduced(size, all_native(name), rows, width, dtype)
    assert torch.equal(total, bits(expected_sum(size, rows, width, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_native_ranks_and_those_of_torch_understand_each_other(
    size: int, dtype: torch.dtype
) -> None:
    name = next(iter(runnable_libraries()))
    for torch_rank in range(size):
        total = reduced(
            size, lambda r: TorchKernels() if r == torch_rank else native(name), 70, 31, dtype  # noqa: B023
        )  # fmt: skip
        assert torch.equal(total, bits(expected_sum(size, 70, 31, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_bias_is_added_to_the_rounded_sum(name: str, dtype: torch.dtype) -> None:
    bias = part_of(9, 1, 31, dtype)[0]
    chosen = [native(name), TorchKernels()]
    results = run_ranks(
        2,
        lambda c: chosen[c.rank].all_reduce(part_of(c.rank, 20, 31, dtype), c, bias),
        buffer_bytes=BUFFER_BYTES,
    )
    total = expected_sum(2, 20, 31, dtype=dtype) + bias
    assert torch.equal(same_on_every_rank([bits(x) for x in results]), bits(total))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_residual_is_added_as_torch_does(name: str, dtype: torch.dtype) -> None:
    for rows in (0, 1, 30):
        x, residual = part_of(0, rows, 37, dtype), part_of(1, rows, 37, dtype)
        assert torch.equal(bits(native(name).add(x, residual)), bits(x + residual))


def test_results_do_not_change_when_later_calls_reuse_the_buffers() -> None:
    chosen: list[Kernels] = [native(next(iter(runnable_libraries()))) for _ in range(2)]
    chosen.append(TorchKernels())

    def many_calls(communicator: RankGroup) -> list[Tensor]:
        rank = communicator.rank  # type: ignore[attr-defined]
        results = []
        for call in range(300):
            if (call // 7 + rank) % 3 == 0:
                os.sched_yield()
            x = part_of(rank, call % 5, 9, torch.float32, call)
            results.append(chosen[rank].all_reduce(x, communicator))
        return results

    for of_rank in run_ranks(3, many_calls, buffer_bytes=64):
        for call, result in enumerate(of_rank):
            expected = expected_sum(3, call % 5, 9, dtype=torch.float32, call=call)
            assert torch.equal(result, expected), call


def test_a_dtype_that_is_not_native_is_reduced_all_the_same() -> None:
    chosen = [native(next(iter(runnable_libraries()))) for _ in range(2)]
    results = run_ranks(
        2, lambda c: chosen[c.rank].all_reduce(torch.full((2, 3), c.rank + 1, dtype=torch.int64), c)
    )
    assert same_on_every_rank(results).tolist() == [[3] * 3] * 2


def test_who_waits_in_the_kernel_leaves_the_interpreter_to_others() -> None:
    fd = create_group_region(2, 64)
    groups = [ShmCommunicator(fd, rank, 2, 64) for rank in range(2)]
    chosen = [native(next(iter(runnable_libraries()))) for _ in range(2)]
    parts = [torch.full((1, 4), rank + 1.0) for rank in range(2)]
    thread = threading.Thread(target=chosen[1].all_reduce, args=[parts[1], groups[1]])
    thread.start()
    while progress(fd, 2) != [0, 1]:
        os.sched_yield()
    assert chosen[0].all_reduce(parts[0], groups[0]).tolist() == [[3.0] * 4]
    thread.join()
    assert progress(fd, 2) == [1, 1]
    assert parts[1].tolist() == [[3.0] * 4]
    os.close(fd)
