"""The comparison runs our engine and others in turn, and counts turns that did all the work."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nanocore.demo_model import demo_model_folder

pytestmark = pytest.mark.campaign

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEMO_MODEL = demo_model_folder()

FAKE_DRIVER = """\
import sys
sys.path.insert(0, {peers!r})
from line_protocol import claim_stdout, describe_run, serve
answers = claim_stdout()
print("loading")  # goes to the log
log = open({log!r}, "a")

def run(requests, sampling):
    print(len(requests), [n for _, n in requests], *sampling.items(), file=log, flush=True)
    ids = [[7] * (n - {missing}) for _, n in requests]
    return describe_run(0.5, [0.1] * len(ids), [0.01] * len(ids), ids)

serve(answers, run, versions={{"fake": "1.0"}}, settings={{}})
print("ended", file=log, flush=True)
"""


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compare")


@pytest.fixture
def peer_process(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peer_process")


def fake_driver(folder: Path, missing: int = 0) -> tuple[Path, Path]:
    """A driver that answers at once, and the file it writes what it was asked to."""
    log = folder / "fake.log"
    script = folder / "fake_driver.py"
    script.write_text(
        FAKE_DRIVER.format(peers=str(BENCHMARKS / "peers"), log=str(log), missing=missing)
    )
    return script, log


def tiny_workload(name: str, vocab_size: int, repetition: int) -> Any:
    workloads = importlib.import_module("workloads")
    prompts = [(repetition % vocab_size, i, 3) for i in range(2)]
    requests = tuple(workloads.BenchmarkRequest(prompt, 4) for prompt in prompts)
    sampling = workloads.make_workload(name, vocab_size, repetition).sampling
    return workloads.Workload(name, requests, sampling)


def run_compare(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str
) -> dict[str, Any]:
    monkeypatch.setattr(compare, "make_workload", tiny_workload)
    monkeypatch.setattr(compare.ReadCanary, "gb_per_s", lambda _: 40.0)  # all are comparable
    common = [
        "--model",
        str(DEMO_MODEL),
        "--threads",
        "1",
        "--kv-cache-gib",
        "1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["compare.py", *common, *flags])
    compare.main()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_our_engine_and_another_are_compared(
    compare: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, log = fake_driver(tmp_path)
    flags = ["--driver", f"fake={sys.executable} {script}", "--workloads", "W1,W5"]
    report = run_compare(compare, monkeypatch, tmp_path / "out.json", *flags, "--reps", "2")
    assert report["engines"]["fake"]["versions"] == {"fake": "1.0"}
    assert report["engines"]["nanocore"]["versions"]["nanocore"]
    for workload in report["workloads"].values():
        ours, fake = workload["engines"]["nanocore"], workload["engines"]["fake"]
        assert fake["wall_s"]["values"] == [0.5, 0.5]
        assert fake["output_tokens_per_s"]["median"] == 16.0
        assert fake["tpot_ms"]["median"] == 10.0
        assert ours["first_tokens_like_ours"] == 1.0
        for ratio, wall_s in zip(
            fake["times_slower_than_ours"]["values"], ours["wall_s"]["values"], strict=True
        ):
            assert ratio == pytest.approx(0.5 / wall_s, rel=1e-3)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["|", "workload", "|", "nanocore", "|", "fake", "|"] in table
    assert any(line[:5] == ["|", "W1", "(output", "tok/s)", "|"] for line in table)
    lines = log.read_text().splitlines()
    # Two cut workloads to warm up, then for each of 2 x 2 turns a short request and the workload.
    assert lines == ["2 [4, 4]"] * 2 + ["1 [4]", "2 [4, 4]"] * 4 + ["ended"]


def test_filters_behind_a_workloads_name_reach_every_engine(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, log = fake_driver(tmp_path)
    flags = ["--driver", f"fake={sys.executable} {script}", "--reps", "1"]
    report = run_compare(
        compare, monkeypatch, tmp_path / "out.json", *flags, "--workloads", "W1+top_k+top_p"
    )
    asked = "('temperature', 1.0) ('top_k', 50) ('top_p', 0.9)"
    assert log.read_text().splitlines()[:2] == [f"2 [4, 4] {asked}", f"1 [4] {asked}"]
    workload = report["workloads"]["W1+top_k+top_p"]
    assert workload["sampling"] == {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    for engine in workload["engines"].values():
        assert engine["output_tokens_per_s"]["median"] > 0
        assert "first_tokens_like_ours" not in engine  # tokens are random


def test_an_unknown_filter_or_workload_is_refused(compare: ModuleType) -> None:
    known = "W1,W1+temperature,W5+min_p+top_k"
    assert compare.workload_names(known) == known.split(",")
    for name in ("W9", "W1+", "W1+top_q", "W9+top_k"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"unknown: {name};")):
            compare.workload_names(f"W1,{name}")


def test_a_turn_with_too_few_tokens_is_an_error(peer_process: ModuleType, tmp_path: Path) -> None:
    script, _ = fake_driver(tmp_path, missing=1)
    command = peer_process.PeerCommand("fake", [sys.executable, str(script)])
    with peer_process.PeerProcess(command, tmp_path / "log") as peer:
        peer.wait_ready()
        with peer.turn(), pytest.raises(peer_process.PeerError, match=r"\[3, 3\].*\[4, 4\]"):
            peer.run(tiny_workload("W1", 100, 1).requests)


def test_an_engine_is_stopped_between_its_turns(peer_process: ModuleType, tmp_path: Path) -> None:
    script, _ = fake_driver(tmp_path)
    command = peer_process.PeerCommand("fake", [sys.executable, str(script)])
    with peer_process.PeerProcess(command, tmp_path / "log") as peer:
        peer.wait_ready()
        stopped = os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None
        assert stopped.si_pid == peer.pid
        with peer.turn():
            assert peer.run(tiny_workload("W1", 100, 1).requests).wall_s == 0.5
    assert not Path(f"/proc/{peer.pid}").exists()


def test_an_engine_that_does_not_start_is_named_with_its_log_and_the_remedy(
    peer_process: ModuleType, tmp_path: Path
) -> None:
    code = "import sys; sys.exit('no such wheel')"
    command = peer_process.PeerCommand("fake", [sys.executable, "-c", code], remedy="Install it.")
    with (
        peer_process.PeerProcess(command, tmp_path / "log") as peer,
        pytest.raises(peer_process.PeerError, match="Install it") as caught,
    ):
        peer.wait_ready()
    assert "exit code 1" in str(caught.value)
    assert "no such wheel" in str(caught.value)


def test_another_engine_is_the_first_in_each_round(
    monkeypatch: pytest.MonkeyPatch, compare: ModuleType
) -> None:
    peers = importlib.import_module("peer_process")
    monkeypatch.setattr(compare, "make_workload", tiny_workload)
    seen: list[tuple[str, int]] = []

    class FakePeer:
        def __init__(self, name: str) -> None:
            self.name = name

        def turn(self) -> Any:
            return nullcontext()

        def run(self, requests: Any, sampling: Any) -> Any:
            if len(requests) > 1:
                seen.append((self.name, requests[0].prompt_token_ids[0]))
            return peers.PeerRun(
                wall_s=1.0, ttft_s=[], tpot_s=[], num_output_tokens=[], first_token_ids=[]
            )

    class FakeCanary:
        def __init__(self) -> None:
            self.rates = iter(range(40, 60))

        def gb_per_s(self) -> float:
            return float(next(self.rates))

    runs = compare.run_rounds([FakePeer(n) for n in "abc"], ["W1"], 2, 10_000, FakeCanary())
    rates = {name: [run.read_gb_per_s for run in own] for name, own in runs["W1"].items()}
    assert rates == {"a": [42, 45], "b": [40, 46], "c": [41, 44]}  # the lower of before and after
    assert seen == [("b", 1), ("c", 1), ("a", 1), ("c", 2), ("a", 2), ("b", 2)]
    assert {name: len(own) for name, own in runs["W1"].items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "vllm-cpu"], "--vllm-python is missing"),
        (["--peers", "llama.cpp", "--llama-server", "/nowhere"], "/nowhere: not an executable"),
        (["--peers", "tgi"], "--peers tgi: unknown"),
        (["--driver", "nanocore=true"], "a name of its own"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(flags: list[str], message: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PYTHON", "LLAMA_SERVER")}
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / "compare.py"), "--model", str(DEMO_MODEL), *flags],
        capture_output=True, text=True, check=False, timeout=60, env=environment,
    )  # fmt: skip
    assert result.returncode == 1
    assert message in result.stderr
