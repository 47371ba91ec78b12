"""The benchmark of hostile clients, cut short: what they may not do to an engine and to others."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_MESSAGES = 10_000


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hostile")


def test_an_engine_and_its_clients_outlive_hostile_ones(
    hostile: ModuleType, short_path: Path
) -> None:
    report = hostile.run(
        short_path,
        num_messages=NUM_MESSAGES,
        messages_per_s=1e9,
        num_attackers=2,
        num_bystanders=1,
        num_connections=100,
        quiet_s=0.5,
        seed=7,
    )
    assert report["num_messages"] >= NUM_MESSAGES
    assert report["engine_alive"]
    assert report["failures"] == []
    assert report["engine_exit_code"] == 0
    assert report["bystanders"]["mismatches"] == []
    assert report["descriptors_leaked"] == 0
    assert report["requests_left"] == 0
    assert report["free_blocks_after"] == report["free_blocks_before"]
    # Attackers get an answer to each message but to those that have none, and each is counted.
    answers = report["answers"]
    codes = ("protocol_error", "unknown_op", "no_session")
    num_errors = sum(answers[f"ERROR {code}"] for code in codes)
    assert NUM_MESSAGES / 3 < num_errors <= report["num_protocol_errors"]
    assert {"ERROR invalid_request", "ACCEPTED", "WELCOME", "REFUSED", "REPLY"} <= answers.keys()
    assert report["engine_log_lines"] < 100
