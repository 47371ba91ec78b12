"""A run's JSON, its file and its table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nanocore.bench.datasets import PromptSource
from nanocore.bench.html_report import MAX_TIMELINE_REQUESTS, html_report
from nanocore.bench.load import Run, Target
from nanocore.bench.opened import Opened
from nanocore.bench.outcome import BenchRequest, Outcome
from nanocore.bench.result import DETAILS, result_path, serve_result, table, write_result
from nanocore.bench.serve_flags import parse
from nanocore.bench.serve_options import ServeOptions
from nanocore.protocol.errors import ConfigError
from tests.bench.outcomes import FAILED, FIRST, SECOND

KEYS = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
]
"""Of vLLM 0.32's `bench serve --save-result --save-detailed`, in its order, but for `rtfx`, which
is of speech."""


class NoTarget:
    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        raise NotImplementedError


NOBODY: Target = NoTarget()
OPENED = Opened(NOBODY, PromptSource(None, takes_text=True), "org/the-model", None)
BEGAN = datetime(2026, 11, 24, 9, 8, 7)


def result(
    line: str = "", outcomes: tuple[Outcome, ...] = (FIRST, SECOND, FAILED)
) -> dict[str, Any]:
    run = Run(list(outcomes), 2.0)
    return serve_result(options(line), OPENED, run, [0.5, 1.0, 1.5], BEGAN)


def options(line: str = "") -> ServeOptions:
    return parse(line.split())


def test_the_keys_are_vllms() -> None:
    assert list(result()) == KEYS


def test_the_values_by_hand() -> None:
    found = result("--num-prompts 3 --percentile-metrics ttft,e2el --metric-percentiles 50,99.9")
    assert found["date"] == "20261124-090807"
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["request_rate"], found["request_goodput"]) == ("inf", None)
    assert found["input_lens"] == [10, 20, 30]
    assert found["output_lens"] == [4, 1, 0]
    assert found["ttfts"][:2] == [0.5, 1.0]
    assert found["itls"] == [[0.25, 0.5], [], []]
    assert found["errors"] == ["", "", "HTTP 500"]
    assert (found["mean_ttft_ms"], found["p50_ttft_ms"], found["std_ttft_ms"]) == (750, 750, 250)
    assert found["p99.9_e2el_ms"] == pytest.approx(1249.75)
    assert "mean_itl_ms" not in found


def test_a_ramp_and_metadata_are_told() -> None:
    found = result(
        "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 3 --metadata tp=2 x=y"
    )
    assert (found["tp"], found["x"], found["ramp_up_end_rps"]) == ("2", "y", 3)
    assert found["rps_change_events"] == [
        {"rps": 1, "timestamp": "2026-11-24T09:08:07"},
        {"rps": 2, "timestamp": "2026-11-24T09:08:08"},
        {"rps": 3, "timestamp": "2026-11-24T09:08:08.500000"},
    ]


def test_queueing_on_our_side_is_told_where_there_is_any() -> None:
    metrics = "--percentile-metrics client_queue_time,e2el_including_client_queue"
    assert "mean_client_queue_time_ms" not in result(metrics)
    assert result(f"{metrics} --max-concurrency 2")["mean_client_queue_time_ms"] == 0


def test_the_table_is_vllms() -> None:
    lines = table(result("--request-rate 4 --goodput ttft:700")).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1:6] == [
        "Successful requests:                     2",
        "Failed requests:                         1",
        "Request rate configured (RPS):           4.00",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      30",
    ]
    assert "Request goodput (req/s):                 0.50" in lines
    place = lines.index("---------------Time to First Token----------------")
    assert lines[place + 1 : place + 4] == [
        "Mean TTFT (ms):                          750.00",
        "Median TTFT (ms):                        750.00",
        "P99 TTFT (ms):                           995.00",
    ]
    assert lines[-1] == "=" * 50


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "openai-infqps-the-model-20261124-090807.json"),
        ("--label x --request-rate 2.5 --max-concurrency 8",
         "x-2.5qps-concurrency8-the-model-20261124-090807.json"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 3 --result-dir a/b",
         "a/b/openai-ramp-up-linear-1qps-3qps-the-model-20261124-090807.json"),
        ("--result-dir a --result-filename r.json", "a/r.json"),
    ],
)  # fmt: skip
def test_the_files_name_is_vllms(line: str, name: str) -> None:
    assert str(result_path(options(line), result(line))) == name


def test_details_are_written_if_asked_for_and_results_appended(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "r.json", result()
    report = options("--append-result").report
    write_result(report, path, found)
    write_result(replace(report, save_detailed=True), path, found)
    short, detailed = map(json.loads, path.read_text().splitlines())
    assert list(short) == [key for key in KEYS if key not in DETAILS]
    assert list(detailed) == KEYS
    write_result(options("--save-result").report, path, found)
    assert json.loads(path.read_text()) == short
    with pytest.raises(ConfigError, match="Is a directory: the result is not written"):
        write_result(report, tmp_path, found)


def page(outcomes: list[Outcome]) -> str:
    found = result(outcomes=tuple(outcomes))
    return html_report({**found, "percentiles": (50.0, 99.0)}, outcomes)


def test_the_page_needs_no_other_and_says_what_was_measured() -> None:
    text = page([FIRST, SECOND, FAILED])
    assert text.count("<svg") == 3
    assert not re.search(r"<script|<link|<img|@import|src=|<!DOCTYPE svg|<\?xml", text)
    references = re.findall(r'href="([^"]*)"|url\(([^)]*)\)', text)
    assert references
    assert {
        one or other for one, other in references if not (one or other).startswith("#")
    } == set()
    assert "<td>TTFT</td><td>750.00</td><td>750.00</td><td>750.00</td><td>995.00</td>" in text
    assert "HTTP 500" in text
    assert "to the first token" in text


def test_what_servers_say_is_no_markup_of_the_page() -> None:
    bad = Outcome(1, 0.0, 0.0, error="<script>alert(1)</script>")
    text = page([bad])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_page_of_failures_has_no_plots() -> None:
    assert "<svg" not in page([FAILED])


def test_a_page_of_many_requests_shows_some() -> None:
    num_requests = MAX_TIMELINE_REQUESTS * 2 + 1
    assert f"267 of {num_requests} requests" in page([FIRST] * num_requests)
