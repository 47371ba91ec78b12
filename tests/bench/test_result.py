"""Statistics by hand and against numpy; the result's JSON, its file and its table."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanocore.bench.datasets import PromptSource
from nanocore.bench.load import BenchRequest, LoadRun, Outcome
from nanocore.bench.result import (
    DETAILS,
    distribution,
    draft_result,
    is_within,
    latencies_s,
    per_second,
    result_path,
    serve_result,
    table,
    totals,
    write_result,
)
from nanocore.bench.serve_flags import LoadOptions, parse
from nanocore.bench.targets import DraftCounts, OpenTarget
from nanocore.protocol.errors import ConfigError
from tests.bench.outcomes import FAILED, FIRST, SECOND, outcome

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


async def send(request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
    raise NotImplementedError


async def draft_counts() -> DraftCounts:
    raise AssertionError("nothing is measured")


OPENED = OpenTarget(send, PromptSource(None, takes_text=True), "org/the-model", None, draft_counts)
BEGAN = datetime(2026, 11, 24, 9, 8, 7)


def result(
    line: str = "", outcomes: tuple[Outcome, ...] = (FIRST, SECOND, FAILED)
) -> dict[str, Any]:
    run = LoadRun(list(outcomes), 2.0)
    return serve_result(options(line), OPENED, run, BEGAN)


def options(line: str = "") -> LoadOptions:
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


def test_metadata_is_told() -> None:
    found = result("--metadata tp=2 x=y")
    assert (found["tp"], found["x"]) == ("2", "y")


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


def test_drafts_are_told_as_by_vllm() -> None:
    before = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 12, "0": 10, "1": 2}
    after = {"num_drafts": 18, "num_draft_tokens": 60, "num_accepted_tokens": 27, "0": 16, "1": 9}
    after["10"] = after["2"] = 2
    drafts = draft_result(before, after)
    assert drafts == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.875,
        "spec_decode_num_drafts": 8,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.875, 0.25, 0.25],
    }
    assert table(result() | drafts).splitlines()[-12:] == [
        "---------------Speculative Decoding---------------",
        "Acceptance rate (%):                     75.00",
        "Acceptance length:                       2.88",
        "Drafts:                                  8",
        "Draft tokens:                            20",
        "Accepted tokens:                         15",
        "Per-position acceptance (%):",
        "  Position 0:                            75.00",
        "  Position 1:                            87.50",
        "  Position 2:                            25.00",
        "  Position 3:                            25.00",
        "=" * 50,
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"num_drafts": 5}, {}),
        ({"num_drafts": 5, "num_draft_tokens": 9}, {"num_drafts": 5, "num_draft_tokens": 9}),
        ({"num_drafts": 5}, {"num_drafts": 3}),
    ],
    ids=["no counters", "gone after the run", "no drafts", "the engine was restarted"],
)
def test_without_drafts_nothing_is_told_of_them(before: DraftCounts, after: DraftCounts) -> None:
    assert draft_result(before, after) == {}
    assert "Speculative" not in table(result())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "openai-infqps-the-model-20261124-090807.json"),
        ("--label x --request-rate 2.5 --max-concurrency 8",
         "x-2.5qps-concurrency8-the-model-20261124-090807.json"),
        ("--result-dir a --result-filename r.json", "a/r.json"),
    ],
)  # fmt: skip
def test_the_files_name_is_vllms(line: str, name: str) -> None:
    assert str(result_path(options(line), result(line))) == name


def test_details_are_written_if_asked_for_and_results_appended(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "r.json", result()
    appending = options("--append-result")
    write_result(appending, path, found)
    write_result(replace(appending, save_detailed=True), path, found)
    short, detailed = map(json.loads, path.read_text().splitlines())
    assert list(short) == [key for key in KEYS if key not in DETAILS]
    assert list(detailed) == KEYS
    write_result(options("--save-result"), path, found)
    assert json.loads(path.read_text()) == short
    with pytest.raises(ConfigError, match="Is a directory: the result is not written"):
        write_result(appending, tmp_path, found)


# -- statistics ----------------------------------------------------------------------------------

ALL = [FIRST, SECOND, FAILED]


def test_the_metrics_of_a_request() -> None:
    assert (FIRST.ttft_s, FIRST.itls_s, FIRST.latency_s) == (0.5, [0.25, 0.5], 1.25)
    assert FIRST.tpot_s == (1.25 - 0.5) / 3
    assert (SECOND.ttft_s, SECOND.itls_s, SECOND.tpot_s) == (1.0, [], None)
    nothing = Outcome(3, 1.0, 1.5)
    assert (nothing.ttft_s, nothing.latency_s, nothing.queue_s) == (0, 0, 0.5)


def test_latencies_are_of_requests_that_succeeded() -> None:
    assert latencies_s(ALL) == {
        "ttft": [0.5, 1.0],
        "tpot": [0.25],
        "itl": [0.25, 0.5],
        "e2el": [1.25, 1.0],
        "client_queue_time": [0, 0],
        "e2el_including_client_queue": [1.25, 1.0],
    }
    late = Outcome(1, arrival_s=1.0, start_s=3.0)
    late.add_tokens(1, 3.5)
    found = latencies_s([late])
    assert found["client_queue_time"] == [2.0]
    assert (found["e2el"], found["e2el_including_client_queue"]) == ([0.5], [2.5])


def test_totals_by_hand() -> None:
    assert totals(ALL, 2.0, {"ttft": 600}) == {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 2.5,
        "total_token_throughput": 17.5,
    }
    assert totals(ALL, 2.0, {})["request_goodput"] is None


@pytest.mark.parametrize(
    ("goodput_ms", "first", "second"),
    [
        ({"ttft": 500}, True, False),
        ({"ttft": 499}, False, False),
        ({"tpot": 250}, True, True),
        ({"tpot": 249}, False, True),
        ({"e2el": 1000}, False, True),
        ({"ttft": 1000, "e2el": 1250}, True, True),
    ],
)
def test_goodput_takes_the_limit_itself(
    goodput_ms: dict[str, float], first: bool, second: bool
) -> None:
    assert (is_within(FIRST, goodput_ms), is_within(SECOND, goodput_ms)) == (first, second)


def test_tokens_and_requests_are_counted_by_seconds_from_the_first_start() -> None:
    long = outcome(10.0, [(10.5, 1), (13.25, 5)])  # tokens by second: 1 0 2 5, requests: 1 2 2 1
    short = outcome(11.75, [(12.25, 2)])
    num_tokens, num_requests = per_second([short, long, FAILED])
    assert (num_tokens.tolist(), num_requests.tolist()) == ([1, 0, 2, 5], [1, 2, 2, 1])


def test_nothing_that_succeeded_divides_nothing_by_zero() -> None:
    assert [counts.tolist() for counts in per_second([FAILED])] == [[0], [0]]
    assert [*totals([FAILED], 1.0, {"ttft": 1}).values()] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_distributions_by_hand_and_by_numpy() -> None:
    assert distribution([1.0, 2.0, 3.0, 6.0], [0, 50, 75, 100]) == {
        "mean": 3.0,
        "median": 2.5,
        "std": pytest.approx((14 / 4) ** 0.5),  # of the population
        "p0": 1.0,
        "p50": 2.5,
        "p75": 3.75,
        "p100": 6.0,
    }
    rng = random.Random(1)
    values = [rng.expovariate(1) for _ in range(999)]
    assert distribution(values, [99.9])["p99.9"] == np.percentile(values, 99.9)
    assert distribution([], [99.999]) == {"mean": 0, "median": 0, "std": 0, "p99.999": 0}
