"""Absurd sizes, through the command in this process: an exit code and a line, nothing allocated."""

from __future__ import annotations

import logging

import pytest

from nanocore.engine_core import cli
from nanocore.engine_core.cli import main


@pytest.fixture(autouse=True)
def _keep_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What main does to a process that ends, it must not do to that of the tests."""
    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setattr(cli, "join_threads", lambda _: True)  # other tests' grammars


def run_check(flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and what is on stderr, of an engine that would serve the demo model."""
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--check", *flags.split()])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "exit_code"),
    [
        ("--kv-cache-memory-bytes 1000000000000000", 4),
        ("--kv-cache-memory-bytes 99999999999999999999", 2),
        ("--num-gpu-blocks-override 1000000000", 4),
        ("--num-gpu-blocks-override 10000000000000", 2),
        ("--max-num-batched-tokens 1000000000000", 2),
        ("--max-num-seqs 1000000000000", 2),
        ("--max-model-len 1000000000000000", 2),
        ("--max-model-len 1000000000", 2),
        ("--block-size 1099511627776", 2),
        ("--long-prefill-token-threshold 1000000000000", 2),
        ("--max-num-queued-tokens 1000000000000000000", 2),
        ("--step-timeout-s 1e400", 2),
        ("--seed 1000000000000000000000", 2),
        ("--tensor-parallel-size 1000000", 2),
        ("--pipeline-parallel-size 1000", 2),
        ("--gpu-memory-utilization 1e400", 2),
        ("--watermark nan", 2),
        ("--num-gpu-blocks-override 1 --block-size 1", 2),
        ("--curve-dir /nowhere", 2),
        ("--parent-fd 1000000", 2),
        ("--parent-fd foo", 2),
        ("--revision x --model " + "m" * 5000, 3),
        ("--model /" + "m" * 5000, 3),
    ],
)
def test_a_size_that_no_machine_has_is_refused_in_a_line(
    flags: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run_check(flags, capsys)
    assert (code, stderr.count("\n")) == (exit_code, 1), stderr
    assert stderr.startswith("nanocore-engine: ")
    if exit_code != 3:
        assert flags.split()[0] in stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--max-num-batched-tokens 128",
        "--max-num-seqs 5000",
        "--max-num-queued-reqs 1 --max-num-queued-tokens 1",
        "--long-prefill-token-threshold 4096",
        "--max-model-len 2",
        "--num-gpu-blocks-override 1 --max-model-len auto",
        "--block-size 1024",
        "--pipeline-parallel-size 2 --max-num-seqs 1",
        "--kv-cache-memory-bytes 1000000 --max-model-len auto",
    ],
)
def test_one_odd_flag_contradicts_no_default(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run_check(flags, capsys)
    assert (code, stderr) == (0, "")


def test_an_interrupt_at_the_start_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert run_check("", capsys) == (130, "")
