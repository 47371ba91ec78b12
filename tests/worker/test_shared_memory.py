"""Ranks and stages in shared memory: order, sizes, waiting, and ranks that stop."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from nanocore.protocol.errors import ConfigError
from nanocore.worker.communication import shared_memory
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.communication.shared_memory import (
    ShmChannel,
    ShmCommunicator,
    create_channel,
    create_group_region,
    progress,
)
from tests.worker.ranks import run_ranks, same_on_every_rank


def ends(buffer_bytes: int, depth: int) -> tuple[ShmChannel, ShmChannel, int]:
    fd = create_channel(buffer_bytes, depth)
    return ShmChannel(fd, buffer_bytes, depth), ShmChannel(fd, buffer_bytes, depth), fd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_tensors_arrive_in_order_whatever_their_size(dtype: torch.dtype, depth: int) -> None:
    writer, reader, fd = ends(64, depth)
    os.close(fd)
    sent = [torch.randn(i % 7, i % 5 + 1).mul(100).to(dtype) for i in range(200)]
    thread = threading.Thread(target=lambda: [writer.send(x) for x in sent])
    thread.start()
    received = [reader.recv(tuple(x.shape), dtype) for x in sent]
    thread.join()
    for x, y in zip(sent, received, strict=True):
        assert torch.equal(x, y)


def test_a_full_ring_holds_the_writer_until_a_slot_is_read() -> None:
    writer, reader, fd = ends(8, 3)
    sent = [torch.tensor([i]) for i in range(4)]
    thread = threading.Thread(target=lambda: [writer.send(x) for x in sent])
    thread.start()
    while progress(fd, 2) != [3, 0]:
        os.sched_yield()
    assert [reader.recv((1,), torch.int64).item() for _ in sent] == [0, 1, 2, 3]
    thread.join()
    assert progress(fd, 2) == [4, 4]
    os.close(fd)


def test_what_was_received_is_not_changed_by_what_comes_later() -> None:
    writer, reader, fd = ends(8, 1)
    os.close(fd)
    writer.send(torch.tensor([1]))
    first = reader.recv((1,), torch.int64)
    writer.send(torch.tensor([2]))
    assert first.item() == 1


BUFFER_BYTES = 256


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, call: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (0, 4), (BUFFER_BYTES // 2, 5)])
def test_all_ranks_have_the_sum_in_the_order_of_ranks(
    size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    total = run_ranks(
        size, lambda c: c.all_reduce(part_of(c.rank, shape, dtype)), buffer_bytes=BUFFER_BYTES
    )
    expected = torch.zeros(shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    for rank in range(size):
        expected += part_of(rank, shape, dtype)
    assert torch.equal(same_on_every_rank(total), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (0, 4), (BUFFER_BYTES // 2, 5)])
def test_all_ranks_have_every_part_in_the_order_of_ranks(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gathered = run_ranks(
        3, lambda c: c.all_gather(part_of(c.rank, shape, dtype)), buffer_bytes=BUFFER_BYTES
    )
    expected = torch.stack([part_of(rank, shape, dtype) for rank in range(3)])
    assert torch.equal(same_on_every_rank(gathered), expected)


def test_a_tensor_with_strides_is_reduced() -> None:
    total = run_ranks(2, lambda c: c.all_reduce(part_of(c.rank, (4, 6), torch.float32).T))
    expected = part_of(0, (4, 6), torch.float32) + part_of(1, (4, 6), torch.float32)
    assert torch.equal(same_on_every_rank(total), expected.T)


def test_results_do_not_change_when_later_calls_reuse_the_buffers() -> None:
    """Ranks are as far ahead of each other as they can get: each is late at calls of its own."""

    def many_calls(communicator: Communicator) -> list[Tensor]:
        results = []
        for call in range(300):
            if (call // 7 + communicator.rank) % 3 == 0:
                os.sched_yield()
            x = part_of(communicator.rank, (call % 40,), torch.float32, call)
            results.append(communicator.all_reduce(x) if call % 3 else communicator.all_gather(x))
        return results

    for rank_results in run_ranks(3, many_calls, buffer_bytes=64):
        for call, result in enumerate(rank_results):
            parts = [part_of(rank, (call % 40,), torch.float32, call) for rank in range(3)]
            expected = parts[0] + parts[1] + parts[2] if call % 3 else torch.stack(parts)
            assert torch.equal(result, expected), call


def test_progress_shows_who_has_not_arrived() -> None:
    fd = create_group_region(2, 64)
    communicators = [ShmCommunicator(fd, rank, 2, 64) for rank in range(2)]
    assert progress(fd, 2) == [0, 0]
    thread = threading.Thread(target=communicators[1].all_reduce, args=[torch.zeros(1)])
    thread.start()
    while progress(fd, 2) != [0, 1]:
        os.sched_yield()
    communicators[0].all_reduce(torch.zeros(1))
    thread.join()
    assert progress(fd, 2) == [1, 1]
    os.close(fd)


def test_a_rank_that_was_waited_for_long_is_still_noticed() -> None:
    """The wait has gone from polling over yielding to sleeping when the other rank comes."""
    sleeping = threading.Event()

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= 1e-3
        sleeping.set()

    def reduce(communicator: Communicator) -> Tensor:
        if communicator.rank == 1:
            assert sleeping.wait(30)
        return communicator.all_reduce(torch.ones(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory.time, "sleep", sleep)
        assert same_on_every_rank(run_ranks(2, reduce)).tolist() == [2.0]


OTHER_RANK = """
import sys, torch
from nanocore.worker.communication.shared_memory import ShmCommunicator
communicator = ShmCommunicator(int(sys.argv[1]), 1, 2, 64)
total = torch.zeros(100)
for call in range(500):
    total += communicator.all_reduce(torch.arange(100.0) + call)
print(int(total.sum()))
"""


def test_processes_that_inherit_the_descriptor_reduce() -> None:
    fd = create_group_region(2, 64)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, str(fd)],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        communicator = ShmCommunicator(fd, 0, 2, 64)
        os.close(fd)
        total = torch.zeros(100)
        for call in range(500):
            total += communicator.all_reduce(torch.arange(100.0) + call)
        output, _ = other.communicate(timeout=60)
    expected = sum(2 * (i + call) for i in range(100) for call in range(500))
    assert int(total.sum()) == int(output) == expected


def test_the_memory_goes_with_the_last_who_maps_it() -> None:
    before = shared_mappings()
    fd = create_group_region(2, 64)
    communicator = ShmCommunicator(fd, 0, 2, 64)
    os.close(fd)
    assert shared_mappings() == before + 1
    del communicator
    assert shared_mappings() == before


def shared_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:nanocore" in line for line in maps)


def test_a_machine_of_other_memory_ordering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="aarch64"):
        create_group_region(2, 64)


def test_a_rank_that_fails_ends_the_others_of_a_test() -> None:
    def fail(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise ValueError("rank 1")
        communicator.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1"):
        run_ranks(3, fail)
    with pytest.raises(TimeoutError):
        run_ranks(2, lambda c: c.rank and c.all_reduce(torch.zeros(1)), timeout_s=0.05)
