"""The command line of `nanocore bench serve`: what it comes to, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest

from nanocore.bench.load import Traffic
from nanocore.bench.serve_flags import parse
from nanocore.protocol.errors import ConfigError
from nanocore.system.running import Running, registered


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_defaults_are_vllms() -> None:
    options = parse([])
    where = options.destination
    assert (where.backend, where.base_url, where.path) == (
        "openai", "http://127.0.0.1:8000", "/v1/completions",
    )  # fmt: skip
    assert (options.dataset.dataset_name, options.dataset.num_prompts) == ("random", 1000)
    assert (options.dataset.random_input_len, options.dataset.random_output_len) == (1024, 128)
    assert options.traffic == Traffic(math.inf, 1.0)
    assert (options.percentile_metrics, options.percentiles) == (
        ("ttft", "tpot", "itl"), (99.0,),
    )  # fmt: skip
    assert (options.max_concurrency, options.ready_timeout_s, options.num_warmups) == (None, 0, 0)


def test_an_engines_endpoint_means_its_wire() -> None:
    assert parse(["--engine-endpoint", "ipc:///x"]).destination.backend == "nanocore"
    both = parse(["--engine-endpoint", "ipc:///x", "--backend", "openai-chat"]).destination
    assert (both.backend, both.path) == ("openai-chat", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("address", "flags", "found"),
    [
        ("ipc:///e", "", ("nanocore", "ipc:///e", "http://127.0.0.1:8000")),
        ("ipc:///e", "--backend openai", ("openai", None, "http://127.0.0.1:8000")),
        ("ipc:///e", "--served-model-name x", ("openai", None, "http://127.0.0.1:8000")),
        ("unix:/run/sock", "", ("nanocore", "ipc:///e", "http://127.0.0.1:8000")),
        ("http://h:1", "", ("openai", None, "http://h:1")),
        ("http://h:1", "--backend openai-chat", ("openai-chat", None, "http://h:1")),
        ("http://h:1", "--backend nanocore", ("nanocore", "ipc:///e", "http://127.0.0.1:8000")),
        ("http://h:1", "--port 9", ("openai", None, "http://127.0.0.1:9")),
    ],
)
def test_without_an_address_it_is_what_runs(
    address: str,
    flags: str,
    found: tuple[str, str | None, str],
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    kind: Literal["engine", "server"] = "engine" if address.startswith("ipc") else "server"
    with registered(Running(kind=kind, pid=1, address=address, model="m", endpoints=("ipc:///e",))):
        where = parse(flags.split()).destination
    assert (where.backend, where.engine_endpoint, where.base_url) == found


def test_headers_keys_and_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    where = parse(["--base-url", "https://h/", "--header", "a=b=c", "X = y"]).destination
    assert where.base_url == "https://h"
    assert where.headers == {"Authorization": "Bearer secret", "a": "b=c", "X": "y"}
    assert parse(["--host", "::1", "--port", "9"]).destination.base_url == "http://[::1]:9"


def test_lengths_go_to_all_datasets() -> None:
    options = parse(
        ["--input-len", "7", "--output-len", "3", "--random-range-ratio", "0.5"]
    ).dataset
    assert (options.random_input_len, options.random_range_ratio) == (7, (0.5, 0.5))
    assert {
        options.random_output_len,
        options.sharegpt_output_len,
        options.custom_output_len,
        options.prefix_repetition_output_len,
    } == {3}
    apart = parse(["--random-range-ratio", '{"input": 0.1, "output": 0}']).dataset
    assert apart.random_range_ratio == (0.1, 0)


@pytest.mark.parametrize(
    ("arguments", "ignores"),
    [
        ([], True),
        (["--dataset-name", "timed_trace"], True),
        (["--dataset-name", "custom"], False),
        (["--dataset-name", "custom", "--ignore-eos"], True),
    ],
)
def test_random_lengths_and_traces_ignore_eos(arguments: list[str], ignores: bool) -> None:
    assert parse(arguments).fields.ignore_eos is ignores


@pytest.mark.parametrize(
    ("arguments", "is_self_timed"),
    [
        ([], False),
        (["--dataset-name", "timed_trace"], True),
        (["--dataset-name", "timed_trace", "--no-self-timed"], False),
    ],
)
def test_traces_are_self_timed(arguments: list[str], is_self_timed: bool) -> None:
    assert parse(arguments).self_timed is is_self_timed


def test_goodput_and_sampling() -> None:
    line = (
        "--burstiness inf "
        "--goodput ttft:200 e2el:1e3 --temperature 0 --top-k 5 --metric-percentiles 50,99.9 "
        "--percentile-metrics e2el --metadata a=1"
    )
    options = parse(line.split())
    assert options.traffic == Traffic(math.inf, math.inf)
    assert options.goodput_ms == {"ttft": 200, "e2el": 1000}
    assert options.fields.sampling == {"temperature": 0, "top_k": 5}
    assert options.percentiles == (50, 99.9)
    assert options.metadata == {"a": "1"}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--backend tgi", "invalid choice: 'tgi'"),
        ("--request-rate 0", "'0' is not a number above 0"),
        ("--burstiness nan", "'nan' is not a number"),
        ("--num-prompts 0", "'0' is not an integer >= 1"),
        ("--random-range-ratio 1", "a number from 0 to below 1"),
        ('--random-range-ratio {"input":0}', "a number from 0 to below 1"),
        ("--metric-percentiles 101", "percentiles are from 0 to 100"),
        ("--percentile-metrics ttft,foo", "--percentile-metrics foo: choose from ttft"),
        ("--goodput itl:3", "--goodput itl: choose from ttft, tpot, e2el"),
        ("--goodput ttft", "--goodput ttft: write KEY:VALUE"),
        ("--goodput ttft:x", "--goodput ttft: 'x' is not a number of milliseconds"),
        ("--header x", "--header x: write KEY=VALUE"),
        ("--extra-body []", "'[]' is not a JSON object"),
        ("--self-timed", "--self-timed is for a trace"),
        ("--backend nanocore --port 3", "--port is for HTTP"),
        ("--backend nanocore --endpoint /v1/completions", "--endpoint is for HTTP"),
        ("--backend nanocore --header a=b", "--header and --extra-body are for HTTP"),
        ("--curve-dir x", "--curve-dir x: keys are for"),
        ("--base-url localhost:8000", "'localhost:8000' is not a URL such as http://"),
        ("--base-url http://h --port 3", "leave --host and --port out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(line: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(" "))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
