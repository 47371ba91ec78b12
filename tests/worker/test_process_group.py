"""Three processes in two groups through torch.distributed, with gloo."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.worker.communication import process_group
from nanocore.worker.communication.process_group import (
    MAX_BYTES,
    OneShotCommunicator,
    with_one_shot,
)

SCRIPT = Path(__file__).parent / "process_group_rank.py"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("group") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(store), str(rank)], stdout=subprocess.PIPE
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    return [json.loads(output) for output in outputs]


def test_each_rank_reduces_and_gathers_within_its_group(reports: list[dict[str, Any]]) -> None:
    assert [report["rank"] for report in reports] == [[0, 2], [1, 2], [0, 1]]
    for report in reports[:2]:
        assert report["reduced"] == [[3.0] * 3] * 2
        assert report["half"] == [[2.0, 2.0], [4.0, 4.0]]
        assert report["gathered"] == [[[0, 7]], [[1, 7]]]
    assert reports[2]["reduced"] == [[3.0] * 3] * 2
    assert reports[2]["half"] == [[1.0, 1.0], [2.0, 2.0]]
    assert reports[2]["gathered"] == [[[2, 7]]]


def test_tensors_pass_between_groups_in_order(reports: list[dict[str, Any]]) -> None:
    received = [report["received"] for report in reports]
    assert received == [[], [], [[[3.0] * 3] * 2, [[[0, 7], [1, 7]]]]]


def test_nothing_listens_beyond_loopback(reports: list[dict[str, Any]]) -> None:
    addresses = {address for report in reports for address in report["listening"]}
    assert addresses <= LOOPBACK, addresses
    assert addresses, "gloo listens somewhere: the test must have seen it"


CPU = torch.device("cpu")


@dataclass
class FakeGroup:
    """Rank 0 of two that hold the same tensors. other: what the other rank's come out as."""

    device: torch.device = CPU
    rank: int = 0
    size: int = 2
    name: str = "a group"
    other: Callable[[Tensor], Tensor] = lambda x: x
    num_sums: int = 0
    seen: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return 2 * x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack((x, self.other(x)))


@dataclass
class FakeKernel:
    """Doubles, like the sum of two equal tensors; and keeps what it was given."""

    factor: float = 2.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, buffer: Tensor, x: Tensor, operation: str, group: str) -> Tensor:
        self.calls.append((tuple(buffer.shape), operation, group))
        buffer.copy_(x)
        return self.factor * buffer


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(torch.ops.symm_mem, process_group.OPERATION, fake, raising=False)
    buffer = torch.zeros(MAX_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(process_group, "shared_buffer", lambda group: (buffer, ""))
    return fake


def test_small_sums_take_one_kernel_and_others_go_through_the_group(kernel: FakeKernel) -> None:
    group = FakeGroup()
    ranks = with_one_shot(group)  # type: ignore[arg-type]
    assert isinstance(ranks, OneShotCommunicator)
    assert (ranks.rank, ranks.size) == (0, 2)
    kernel.calls.clear()
    group.num_sums = 0
    x = torch.randn(3, 5).t()
    assert torch.equal(ranks.all_reduce(x), 2 * x)
    assert kernel.calls == [((5, 3), "sum", "a group")]
    for large in (torch.ones(MAX_BYTES // 4 + 1), torch.ones(4, dtype=torch.int64)):
        assert torch.equal(ranks.all_reduce(large), 2 * large)
    assert group.num_sums == 2
    assert len(kernel.calls) == 1
    assert torch.equal(ranks.all_gather(x), torch.stack((x, x)))


def test_ranks_that_are_not_on_cuda_use_the_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = FakeGroup()
    assert with_one_shot(group) is group  # type: ignore[arg-type, comparison-overlap]
    assert "not on CUDA" in caplog.text


@pytest.mark.usefixtures("kernel")
def test_one_rank_that_cannot_share_memory_decides_for_all() -> None:
    group = FakeGroup(other=torch.logical_not)
    assert with_one_shot(group) is group  # type: ignore[arg-type, comparison-overlap]


def test_sums_that_come_out_wrong_are_not_used(
    kernel: FakeKernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.factor = 1.0
    group = FakeGroup()
    assert with_one_shot(group) is group  # type: ignore[arg-type, comparison-overlap]
    assert "came out wrong" in caplog.text


@pytest.mark.usefixtures("kernel")
def test_sums_that_differ_between_ranks_are_not_used() -> None:

    def nearly(x: Tensor) -> Tensor:
        return x if x.dtype == torch.bool else torch.nextafter(x, torch.tensor(9.0).to(x))

    group = FakeGroup(other=nearly)
    assert with_one_shot(group) is group  # type: ignore[arg-type, comparison-overlap]
