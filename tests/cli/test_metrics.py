"""`nanocore metrics` and `nanocore top`, of a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.system.running import all_running
from tests.cli.served import DEMO, exit_code
from tests.end_to_end.forked import Engine, engine


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    """An engine that has answered two requests, of 3 tokens each."""

    async def ask(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            for _ in range(2):
                params = SamplingParams(max_tokens=3, ignore_eos=True)
                await client.complete({"prompt_token_ids": [5, 6, 7]}, params)

    with engine(DEMO) as started:
        asyncio.run(ask(started.endpoint))
        yield started


def values(text: str) -> dict[str, float]:
    """Of samples without labels of their own."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"model_name", "engine"}
    }


def test_metrics_are_printed(running: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--metrics-namespace", "vllm", "--served-model-name", "mine")
    assert exit_code("metrics", "--endpoint", running.endpoint, *flags) == 0
    text = capsys.readouterr().out
    found = values(text)
    assert found["vllm:generation_tokens_total"] == 6
    assert found["vllm:prompt_tokens_total"] == 6
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 4
    assert 'vllm:steps_total{engine="0",kind="decode",model_name="mine"} 4.0' in text


def test_an_engine_without_a_server_is_found(
    running: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("metrics") == 0
    assert values(capsys.readouterr().out)["nanocore:generation_tokens_total"] == 6
    (one,) = all_running()
    assert (one.kind, one.pid, one.address) == ("engine", running.process.pid, running.endpoint)
    assert (one.model, one.launched_by) == (str(DEMO), None)


def test_metrics_are_served_until_ctrl_c_also_while_the_engine_is_gone() -> None:
    with engine(DEMO) as started:
        exporter = subprocess.Popen(
            [sys.executable, "-m", "nanocore", "metrics", "--endpoint", started.endpoint,
             "--metrics-port", "0", "--timeout", "60"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert exporter.stdout is not None
        url = exporter.stdout.readline().split()[-1]
        assert values(read(url))["nanocore:engine_up"] == 1
    assert values(read(url)) == {"nanocore:engine_up": 0}
    exporter.send_signal(signal.SIGTERM)
    assert exporter.wait(60) == 143
    exporter.stdout.close()


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


def test_a_look_at_an_engine(running: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--endpoint", running.endpoint, "--interval", "0.01", "--once")
    assert exit_code("top", *flags) == 0
    assert "running" in capsys.readouterr().out
    assert exit_code("top", *flags, "--json") == 0
    load = json.loads(capsys.readouterr().out)
    assert (load["num_running"], load["num_clients"]) == (0, 1)


def test_to_a_pipe_views_are_printed_one_below_the_other(running: Engine) -> None:
    arguments = ["top", "--endpoint", running.endpoint, "--interval", "0.01"]
    with subprocess.Popen(
        [sys.executable, "-m", "nanocore", *arguments], stdout=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        heads = (line for line in top.stdout if "nanocore top" in line)
        assert len([next(heads), next(heads)]) == 2
        top.send_signal(signal.SIGINT)
        top.stdout.read()
        assert top.wait(60) == 130


def test_a_terminal_without_unicode_gets_what_it_can_show(running: Engine) -> None:
    arguments = ["top", "--endpoint", running.endpoint, "--interval", "0.01", "--once"]
    done = subprocess.run(
        [sys.executable, "-m", "nanocore", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "nanocore top ?" in done.stdout


def test_a_reader_that_leaves_ends_it_without_a_word(running: Engine) -> None:
    arguments = ["top", "--endpoint", running.endpoint, "--interval", "0.01", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "nanocore", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as top:  # fmt: skip
        assert top.stdout is not None
        assert top.stderr is not None
        json.loads(top.stdout.readline())
        top.stdout.close()
        assert top.stderr.read() == ""
        assert top.wait(60) == 141


def test_a_full_disk_is_told_in_a_line(running: Engine) -> None:
    command = [sys.executable, "-m", "nanocore", "metrics", "--endpoint", running.endpoint]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, "nanocore: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("top", "--interval", "0"), "not a number of seconds above 0"),
        (("top", "--intervals", "1"), "unrecognized arguments: --intervals 1"),
        (("metrics", "--metrics-namespace", "a-b"), "'a-b' is not a name"),
        (("metrics", "--endpoint", "tcp://127.0.0.1:9"), "needs --curve-dir"),
    ],
)
def test_wrong_flags_are_told_in_a_line(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nanocore {arguments[0]}: ")
    assert text in line


def test_a_host_that_is_none_is_told_in_a_line(
    running: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--metrics-port", "0", "--metrics-host", "nowhere.invalid")
    assert exit_code("metrics", "--endpoint", running.endpoint, *flags) == 2
    assert "--metrics-host nowhere.invalid: " in capsys.readouterr().err


def test_a_port_in_use_is_told_in_a_line(
    running: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c",
         "import socket; s = socket.create_server(('127.0.0.1', 0)); "
         "print(s.getsockname()[1], flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        assert exit_code("metrics", "--endpoint", running.endpoint, "--metrics-port", port) == 5
        other.communicate("\n")
    assert f"--metrics-port {port}: Address already in use" in capsys.readouterr().err
