"""benchmarks/hybrid.py measures all of its parts, and a prefix that is there is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_compare_benchmark import BENCHMARKS, fake_driver

pytestmark = pytest.mark.campaign


@pytest.mark.timeout(300)
def test_all_parts_are_measured_and_kept(tmp_path: Path) -> None:
    driver, _ = fake_driver(tmp_path)
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "hybrid.py"), "--model", "tiny-hybrid"]
    command += ["--reps", "1", "--out", str(out), "--driver", f"fake={sys.executable} {driver}"]
    for parts in ("speed,turns", "hits,memory"):
        result = subprocess.run(
            [*command, "--parts", parts, "--kv-cache-gib", "1"],
            capture_output=True, text=True, check=False,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
    found = {part: one["figures"] for part, one in json.loads(out.read_text()).items()}
    fake = found["speed"]["streams"]["16"]["fake"]
    assert (fake["prompt_tokens_per_s"]["median"], fake["step_ms"]["median"]) == (81920, 10)
    ours = found["speed"]["streams"]["16"]["nanocore"]
    assert ours["decode_times_ours"]["median"] == ours["first_tokens_like_ours"] == 1
    assert ours["step_times_forecast"]["median"] > 0
    turns = found["turns"]
    assert turns["num_prompt_tokens"] == [200 + 250 * turn for turn in range(12)]
    for cached in turns["num_cached_tokens"].values():  # all whole blocks that were computed
        assert cached[1:] == [(250 * turn - 1) // 16 * 16 for turn in range(1, 12)]
    hits = {name: one["num_hits"] for name, one in found["hits"].items()}
    assert hits == {"1600, warm": 64, "1600, cold": 63, "1700, warm": 64, "1700, cold": 63}
    assert found["memory"]["full_mb"] > found["memory"]["started_mb"]
    assert "prefix of 1700, warm: 64 of 64" in result.stdout
