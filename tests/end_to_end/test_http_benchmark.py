"""The benchmark of the HTTP server runs, ends, and takes no wrong answer for a right one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "http_server.py"


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def test_our_server_and_a_bare_write_are_measured_in_one_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--passes", "2", "--scale", "0.1", "--out", str(out)]
    result = run_script(*flags, "--only", "chat_64,completions_1,completions_256_fast,requests_128")
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    streams = {"chat_64", "completions_1"}
    assert report["bare write"].keys() == streams
    ours = report["nanocore"]
    assert ours.keys() == streams | {"completions_256_fast", "requests_128_1"}
    assert all(figure["min"] > 0 for case in ours.values() for figure in case.values())
    assert all(len(figure["values"]) == 2 for case in ours.values() for figure in case.values())
    assert "chat_64 us_per_token" in result.stdout
    assert report["host"]["cores"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "chit"], "unknown chit; known: chat_1, "),
        (["--vllm-python", "/nowhere"], "/nowhere: not an executable"),
    ],
)
def test_what_is_not_known_is_a_usage_error(flags: list[str], message: str) -> None:
    result = run_script(*flags)
    assert result.returncode == 2
    assert message in result.stderr


def answer(*texts: str, num_tokens: int = 3, status: str = "200 OK", end: str = "[DONE]") -> bytes:
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return f"HTTP/1.1 {status}\r\n\r\n{''.join(lines)}data: {end}\n\n".encode()


@pytest.mark.parametrize("benchmark", ["http_load"], indirect=True)
def test_answers_of_the_text_are_counted_by_the_chunks_that_bring_some(
    benchmark: ModuleType,
) -> None:
    job = {"text": "abcdefgh", "tokens": 3}
    assert benchmark.num_text_events(answer("fgh", "", "abc"), job) == 2


@pytest.mark.parametrize("benchmark", ["http_load"], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        answer("fgh", "bcd"),
        answer("fgh", "abc", num_tokens=2),
        answer("fgh", "abc", status="500 No"),
        answer("fgh", "abc", end="[]"),
        answer(""),
    ],
    ids=["another text", "a token too few", "an error", "no end", "no text"],
)
def test_any_other_answer_is_an_error(benchmark: ModuleType, wrong: bytes) -> None:
    with pytest.raises(AssertionError):
        benchmark.num_text_events(wrong, {"text": "abcdefgh", "tokens": 3})
