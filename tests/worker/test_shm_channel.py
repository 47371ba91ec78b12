"""Tensors through a ring of buffers: in order, in pieces, and never overtaking the reader."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from nanocore.worker.communication.shared_memory import ShmChannel, create_channel, read_counters


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
    while read_counters(fd, 2) != [3, 0]:
        os.sched_yield()
    assert [reader.recv((1,), torch.int64).item() for _ in sent] == [0, 1, 2, 3]
    thread.join()
    assert read_counters(fd, 2) == [4, 4]
    os.close(fd)


def test_what_was_received_is_not_changed_by_what_comes_later() -> None:
    writer, reader, fd = ends(8, 1)
    os.close(fd)
    writer.send(torch.tensor([1]))
    first = reader.recv((1,), torch.int64)
    writer.send(torch.tensor([2]))
    assert first.item() == 1
