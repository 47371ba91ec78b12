"""Rates of prompts: which work they count, and what they are compared with."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanocore.kernels.cpu.library import find_library

pytestmark = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def test_rates_are_work_by_seconds_and_shares_are_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: Any = import_module("prompt_rates")
    monkeypatch.setattr(rates, "LAYERS", {"layer": (64, 96)})
    monkeypatch.setattr(rates, "HEADS", {"heads": (4, 2, 32)})
    monkeypatch.setattr(rates, "_time", lambda run, _: run() is None or 2e-6)
    out = tmp_path / "rates.json"
    arguments = ["prompt_rates.py", "--rounds", "2", "--rows", "16", "--layers", "layer"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(out)])
    rates.main()
    report = json.loads(out.read_text())
    products, attention = report["products"]["layer, 16 rows"], report["attention"]
    assert list(products) == ["bf16", "int8", "int4", "torch bf16", "torch float32", "beside"]
    for side, figure in products.items():
        expected = 1.0 if side == "beside" else 2 * 16 * 64 * 96 / 2e-6 / 1e9
        assert figure["values"] == [pytest.approx(expected)] * 2
    figures = attention["heads, 16 tokens"]
    assert list(figures) == ["attention", "torch", "products", "share"]
    # Of the squares of tokens by tokens that Q K^T and P V have, half are computed.
    work, product_work = 2 * 4 * 32 * 16 * 16, 2 * 16 * 128 * 512
    assert figures["share"]["values"] == [pytest.approx(work / product_work, abs=1e-4)] * 2


def test_a_prompt_may_end_within_a_block() -> None:
    rates: Any = import_module("prompt_rates")
    assert rates._one_prompt(20).block_table.tolist() == [[0, 1]]
    library = find_library()
    assert library is not None
    figures = rates.measure_attention(rates.CpuKernels(library), 4, 2, 32, 20, 1)
    assert len(figures["attention"]["values"]) == 1
