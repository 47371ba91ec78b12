"""Whole benchmarks: against a real engine over its wire, over HTTP, and with engines of their own.

Counts and keys are checked, never times.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nanocore.bench.datasets import check_file
from nanocore.bench.offline import (
    OwnEngine,
    engine_arguments,
    latency_parser,
    parse,
    throughput_parser,
)
from nanocore.bench.serve_flags import parse as parse_serve
from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
)
from nanocore.protocol.metrics import Stats
from tests.bench.conftest import DEMO_MODEL, MakeFile
from tests.bench.fake_server import serving
from tests.cli.served import exit_code
from tests.end_to_end.forked import engine
from tests.http.served_engine import served_engine

EXIT_TIMEOUT_S = 60.0


def run(arguments: list[str]) -> object:
    """Exit code of `nanocore bench`."""
    return exit_code("bench", *arguments)


TRACE = (
    '{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1, "input_length": 99999, "output_length": 3, "hash_ids": [1]}\n'
    '{"timestamp": 2, "input_length": 18, "output_length": 2, "hash_ids": [1, 3]}\n'
)


def measured(line: str, file: Path) -> dict[str, Any]:
    """Of a run of `serve` that succeeds: its detailed result."""
    saved = f"--save-result --save-detailed --disable-tqdm --result-filename {file}"
    assert run(["serve", *line.split(), *saved.split()]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_an_engine_is_measured_over_its_wire(
    demo_endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(
        f"--engine-endpoint {demo_endpoint} --num-prompts 6 --input-len 9 --output-len 4 "
        f"--max-concurrency 3 --num-warmups 2 --ready-check-timeout-sec 60 --temperature 0 "
        f"--percentile-metrics ttft,e2el --goodput ttft:1e9",
        tmp_path / "r.json",
    )
    assert (result["backend"], result["completed"], result["failed"]) == ("nanocore", 6, 0)
    assert (result["input_lens"], result["output_lens"]) == ([9] * 6, [4] * 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (54, 24)
    assert result["model_id"] == result["tokenizer_id"] == str(DEMO_MODEL)
    assert result["request_goodput"] == result["request_throughput"]
    assert len(result["ttfts"]) == len(result["itls"]) == 6
    assert any(result["generated_texts"])
    assert {"p99_ttft_ms", "p99_e2el_ms"} <= result.keys()
    assert "Successful requests:                     6\n" in capsys.readouterr().out


def test_a_trace_is_replayed_and_a_request_that_fails_is_counted(
    demo_endpoint: str,
    tmp_path: Path,
    dataset_file: MakeFile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = measured(
        f"--engine-endpoint {demo_endpoint} --dataset-name timed_trace --dataset-path "
        f"{dataset_file(TRACE)} --timed-trace-sec-multiplier 0.001",
        tmp_path / "r.json",
    )
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["output_lens"] == [3, 0, 2]
    assert "ContextLengthError" in result["errors"][1]
    assert "a request failed: ContextLengthError" in capsys.readouterr().err


def test_requests_of_a_trace_share_prefixes_as_they_did_there(
    demo_endpoint: str, tmp_path: Path, dataset_file: MakeFile
) -> None:
    def num_hits() -> int:
        async def ask() -> int:
            async with AsyncEngineClient.connect(demo_endpoint) as client:
                return (await client.stats()).prefix_cache_hits

        return asyncio.run(ask())

    row = {"timestamp": 0, "input_length": 40, "output_length": 1}
    rows = [{**row, "hash_ids": [77, 78, i]} for i in range(3)]
    text = "\n".join(map(json.dumps, rows))
    line = (
        f"--engine-endpoint {demo_endpoint} --dataset-name timed_trace --dataset-path "
        f"{dataset_file(text)} --no-oversample --max-concurrency 1"
    )
    before = num_hits()
    assert measured(line, tmp_path / "r.json")["completed"] == 3
    assert num_hits() - before == 2 * 32  # 77 and 78, of the second and the third one


def test_nothing_that_succeeds_is_exit_code_1(demo_endpoint: str) -> None:
    line = f"serve --engine-endpoint {demo_endpoint} --num-prompts 2 --input-len 99999"
    assert run([*line.split(), "--disable-tqdm"]) == 1


def test_a_server_is_measured_over_http(tmp_path: Path) -> None:
    with served_engine() as url:
        for backend, extra in (("openai", "--temperature 0"), ("openai-chat", "--ignore-eos")):
            result = measured(
                f"--backend {backend} --base-url {url} --num-prompts 5 --input-len 12 "
                f"--output-len 6 --ready-check-timeout-sec 60 {extra}",
                tmp_path / f"{backend}.json",
            )
            assert (result["completed"], result["failed"]) == (5, 0)
            assert result["output_lens"] == [6] * 5
            assert result["tokenizer_id"] == str(DEMO_MODEL)  # which the server names as the root
            assert min(result["input_lens"]) >= 11
            assert any(result["generated_texts"])


SUFFIXES = "--speculative-config", '{"method": "suffix", "adaptive": false}'
DRAFTED = "--num-prompts 3 --input-len 20 --output-len 24 --seed 7 --temperature 0 --ignore-eos"


def drafts(results: list[dict[str, Any]]) -> list[int]:
    """What was counted in all of them; whether drafts are worth it is up to the machine."""
    names = "num_drafts", "draft_tokens", "accepted_tokens"
    return [sum(one.get(f"spec_decode_{name}", 0) for one in results) for name in names]


def test_drafts_are_those_that_the_engine_counted_meanwhile(tmp_path: Path) -> None:
    with engine(DEMO_MODEL, *SUFFIXES) as running:
        line = f"--engine-endpoint {running.endpoint} {DRAFTED} --num-warmups 0"
        results = [measured(line, tmp_path / f"{i}.json") for i in range(2)]

        async def ask() -> Stats:
            async with AsyncEngineClient.connect(running.endpoint) as client:
                return await client.stats()

        stats = asyncio.run(ask())
    assert drafts(results) == [
        stats.spec_decode_num_drafts,
        stats.spec_decode_num_draft_tokens,
        stats.spec_decode_num_accepted_tokens,
    ]


def test_drafts_of_a_server_are_those_of_its_metrics(tmp_path: Path) -> None:
    with served_engine(*SUFFIXES) as url:
        line = f"--backend openai --base-url {url} {DRAFTED}"
        results = [measured(line, tmp_path / f"{i}.json") for i in range(2)]
        with urllib.request.urlopen(f"{url}/metrics") as response:
            text = response.read().decode()
    names = "drafts", "draft_tokens", "accepted_tokens"
    assert drafts(results) == [
        float(re.findall(rf"^nanocore:spec_decode_num_{name}_total{{.*}} (.*)$", text, re.M)[0])
        for name in names
    ]


def test_what_a_server_says_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--num-prompts 1 --dataset-name random --tokenizer {DEMO_MODEL} --disable-tqdm"
    with serving(lambda body: (500, [b"\x1b]0;pwned\x07\xc2\x9b31m"])) as server:
        where = ["--backend", "openai", "--base-url", server.url, "--model", "m\x1b[2J"]
        assert run(["serve", *where, *line.split()]) == 1
    shown = capsys.readouterr()
    assert r"HTTP 500: \x1b]0;pwned\x07\x9b31m" in shown.err
    assert "\x1b" not in shown.out + shown.err


@pytest.mark.usefixtures("forked_launches")
def test_throughput_has_vllms_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    flags = "--num-prompts 4 --input-len 6 --output-len 5 --num-warmups 2 --max-num-seqs 8"
    assert run(["throughput", *flags.split(), "--disable-tqdm", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result) == [
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second",
        "tokens_per_second",
    ]  # fmt: skip
    assert (result["num_requests"], result["total_num_tokens"]) == (4, 44)
    assert "Total num output tokens:  20\n" in capsys.readouterr().out


@pytest.mark.campaign
def test_latency_has_vllms_keys(tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    flags = "--batch-size 2 --input-len 6 --output-len 5 --num-iters 3 --num-iters-warmup 1"
    assert run(["latency", *flags.split(), "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result) == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert len(result["latencies"]) == 3
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_flags_of_an_engine_are_passed_on() -> None:
    flags = "--max-num-seqs 8 --enforce-eager --no-enable-prefix-caching --dtype=float32 --tp 2"
    assert engine_arguments(flags.split()) == {
        "max_num_seqs": "8",
        "enforce_eager": True,
        "no_enable_prefix_caching": True,
        "dtype": "float32",
        "tp": "2",
    }
    for wrong in (["-tp", "2"], ["x"], ["--"]):
        with pytest.raises(ConfigError, match="is not a flag"):
            engine_arguments(wrong)


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("", 2, "which benchmark? there are serve, throughput, latency"),
        ("serv", 2, "did you mean serve?"),
        ("serve --port x", 2, "(nanocore bench serve --help lists the flags)"),
        ("latency --output-json /nowhere/x", 2, "--output-json /nowhere/x"),
        ("latency --num-iters 0", 2, "is not an integer >= 1"),
        ("latency --no-such-flag", 2, "no-such-flag"),
        ("latency --num-iter 1", 2, "`nanocore bench latency` has --num-iters"),
        ("serve --engine-endpoint ipc:///nowhere/e --ready-check-timeout-sec 1", 70, "/nowhere/e"),
        ("serve --dataset-name custom", 2, "--dataset-name custom needs its file"),
        ("throughput --dataset-name timed_trace", 2, "--dataset-name timed_trace needs its file"),
        ("serve --engine-endpoint nonsense", 2, "nonsense"),
    ],
)
def test_what_cannot_be_measured_is_a_line_and_a_code(
    line: str, code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == code
    lines = capfd.readouterr().err.splitlines()
    said = [each for each in lines if each.startswith("nanocore")]
    assert len(said) == 1
    assert text in said[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineStartError("no such folder", 3), 3),
        (EngineStartError("killed", -9), 70),
        (EngineDeadError("gone"), 70),
        (InvalidRequestError("no such value"), 2),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 70),
    ],
)
def test_errors_have_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: OwnEngine) -> None:
        raise error

    monkeypatch.setattr(OwnEngine, "launch", fail)
    assert run(["latency"]) == code


def test_the_commands_of_the_page_are_commands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text("utf-8")
    lines = re.findall(r"^nanocore bench (\w+) (.*)$", page, re.MULTILINE)
    assert {name for name, _ in lines} == {"serve", "throughput", "latency"}
    parsers = {"throughput": throughput_parser, "latency": latency_parser}
    for name, flags in lines:
        if name == "serve":
            check_file(parse_serve(flags.split()).dataset)
        else:
            parse(parsers[name](), flags.split())


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanocore.cli.command.find_spec", lambda name: None)
    assert run(["serve"]) == 2
    said = (
        "nanocore bench serve: measuring needs numpy: in the repository, pip install '.[bench]'\n"
    )
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", ""])
def test_help_is_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: nanocore bench {name}")


def test_ctrl_c_ends_a_run_in_order() -> None:
    """While two requests wait for a server that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(EXIT_TIMEOUT_S)
        line = (
            f"serve --base-url http://127.0.0.1:{listening.getsockname()[1]} --model x "
            f"--tokenizer {DEMO_MODEL} --num-prompts 2 --input-len 4"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "nanocore", "bench", *line.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            counters, _ = listening.accept()  # it asks for those of drafts first
            assert counters.recv(1 << 16).startswith(b"GET /metrics")
            counters.sendall(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
            counters.close()
            connections = [listening.accept()[0] for _ in range(2)]
            for connection in connections:
                connection.settimeout(EXIT_TIMEOUT_S)
                assert connection.recv(1 << 16).startswith(b"POST /v1/completions")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=EXIT_TIMEOUT_S)
        finally:
            process.kill()
            process.communicate()
    for connection in connections:
        assert connection.recv(1) == b""
        connection.close()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
