"""Three processes in two groups through torch.distributed, with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
