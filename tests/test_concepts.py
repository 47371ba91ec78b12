"""docs/concepts.md: its programs print what it says, its steps name tests, its figures hold."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.worker.memory.kv_memory import KVLayout, KVSpec
from tests.fakes import Deliveries, make_request, make_scheduler

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "concepts.md").read_text("utf-8")
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
STEPS_PART = PAGE.partition("\n## What a step computes")[0]
STEPS = re.split(r"^## (?=\d)", STEPS_PART, flags=re.MULTILINE)[1:]
TEXT = " ".join(PAGE.split())
NUM_STEPS = 8
NUM_QUESTIONS = range(20, 30)
TOLERANCE = 0.05
"""Share by which counted lines may differ: enough for a day's work."""


def title(step: str) -> str:
    return step.partition("\n")[0]


def lines_of(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> int:
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def engine_programs() -> list[tuple[str, str]]:
    return [program for program in PROGRAM.findall(PAGE) if "LLM(" in program[0]]


@pytest.mark.parametrize(
    ("source", "printed"),
    [program for program in PROGRAM.findall(PAGE) if "LLM(" not in program[0]],
    ids=lambda text: text.partition("\n")[0],
)
def test_a_program_prints_what_the_page_says(source: str, printed: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, {"__name__": "__main__"})
    assert out.getvalue() == printed


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_launches")
def test_the_program_that_launches_an_engine_does_too() -> None:
    ((source, printed),) = engine_programs()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, {"__name__": "__main__"})
    assert out.getvalue() == printed


def test_every_program_is_run_here() -> None:
    assert len(PROGRAM.findall(PAGE)) == PAGE.count("```python") == 7


@pytest.mark.parametrize("step", STEPS, ids=title)
def test_a_step_names_a_file_a_test_and_a_figure(step: str) -> None:
    items = dict(re.findall(r"^- (File|Test|Figure): (.*?)(?=\n- |\n\n)", step, re.M | re.DOTALL))
    assert items.keys() == {"File", "Test", "Figure"}
    assert re.search(r"\]\(\.\./nanocore/", items["File"])
    assert re.search(r"\d|not measured", items["Figure"])
    named = re.findall(r"`(test_\w+)`\s+in\s+\[[^]]*\]\(\.\./(tests/[\w/.]+)\)", items["Test"])
    assert len(named) == items["Test"].count("`test_") > 0
    for name, file in named:
        assert f"def {name}(" in (ROOT / file).read_text("utf-8")


def test_there_are_eight_steps_and_some_twenty_five_questions() -> None:
    assert [int(step.partition(".")[0]) for step in STEPS] == list(range(1, NUM_STEPS + 1))
    questions = PAGE.partition("\n## Questions")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\*\*[^*]*\?\*\*", questions, re.MULTILINE)) in NUM_QUESTIONS


def test_where_engines_stumble_each_row_names_a_test_of_ours() -> None:
    section = PAGE.partition("\n## Where engines stumble")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    ours = "".join(
        path.read_text("utf-8")
        for folder in ("engine_core", "kv_cache")
        for path in (ROOT / "tests" / folder).glob("*.py")
    )
    assert len(rows) == 4
    for row in rows:
        (name,) = re.findall(r"`(test_\w+)` \|$", row)
        assert f"def {name}(" in ours


def result(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return report


def median(report: dict[str, Any], *path: str) -> float:
    """The figure at this path, rounded to what the page shows."""
    figure: Any = report
    for key in path:
        figure = figure[key]
    return float(figure["median"])


def test_the_figures_of_the_steps_are_those_of_the_json() -> None:
    overhead, load = result("overhead"), result("under-load")["engines"]
    small, sampled = (result(name)["workloads"] for name in ("compare-small", "filters-small"))
    rate, per_token = "output_tokens_per_s", median(small, "W5", "engines", "nanocore", "tpot_ms")
    streams = median(small, "W1", "engines", "nanocore", rate)
    shared = [
        median(small, "W3", "engines", name, "total_tokens_per_s")
        for name in ("nanocore", "llama.cpp bf16")
    ]
    waits = [median(load, name, "itl_ms_max") for name in ("whole", "chunked", "target-200")]
    drawn = [
        median(sampled, name, "engines", "nanocore", rate) for name in ("W1", "W1+temperature")
    ]
    few_bits = result("compare-qwen3-0.6b-four-bits")["workloads"]["W5"]["engines"]
    bits = [median(few_bits, name, "tpot_ms") for name in ("nanocore", "nanocore int4")]
    schema = median(result("structured-outputs-small"), "step", "times_plain")
    decode = result("gpu-h100-second")["figures"]["speed/qwen3-0.6b/idle/b1"]
    step_ms = decode["step_ms"]["median"]
    for said in (
        f"takes {median(overhead, 'nanocore', 'admit_128'):.1f} microseconds "
        f"(vLLM 0.32: {median(overhead, 'vllm', 'admit_128'):.1f};",
        f"{shared[0]:,.0f} tokens/s; llama.cpp, whose slots share nothing, {shared[1]:,.0f}",
        f"make {streams:,.0f} tokens/s; one stream takes {per_token:.1f} ms a token, "
        f"which is {1e3 / round(per_token, 1):.0f} tokens/s",
        f"{waits[0]:,.0f} ms whole, {waits[1]:.0f} in chunks of 512, {waits[2]:.0f} with",
        f"make {drawn[0]:.0f} tokens/s greedy and {drawn[1]:.0f} with a temperature",
        f"is {decode['device_pieces_per_step']:.0f} kernels in {step_ms:.2f} ms",
        f"takes {bits[0]:.1f} ms a token in bf16 and {bits[1]:.1f} in int4",
        f"16 streams of JSON take {schema:.2f} times as long as plain ones",
    ):
        assert said in TEXT
    assert decode["idle_ms"] <= 0
    steps = [median(overhead, "nanocore", f"step_{number}") for number in (1, 256)]
    assert round(steps[1] / steps[0]) == 6, "256 rows cost six times what one costs"


def test_the_figures_of_what_a_step_computes_are_those_of_the_json() -> None:
    figures = result("gpu-h100-second")["figures"]
    decode, prompt = "attention/decode/g2", figures["attention/prefill/g2/4x4096"]
    many = figures[f"{decode}/b256/ctx1024"]
    grouped = [many["us"]["median"], median(figures, "attention/decode/g4/b256/ctx1024", "us")]
    whole = median(figures, f"{decode}/b32/ctx8192", "us")
    window = median(figures, f"{decode}/b32/ctx8192/window", "us")
    shares = [many["share_of_limit"], prompt["share_of_limit"]]
    ours, theirs = median(prompt, "us"), median(prompt, "others", "fa3", "us")
    rows, large = (figures[f"speed/qwen3-0.6b/idle/b{number}"] for number in (32, 256))
    per_s = figures["speed/qwen3-0.6b/prefill/1024"]["tokens_per_s"]
    reading = result("weight-reading")["kinds"]["bf16"]["share_of_best"]
    token_us = 112 * 2**10 / 25e9 * 1e6
    for said in (
        f"H100 ({rows['step_ms']['median']:.2f} ms) where",
        f"two heads a group take {grouped[0]:.0f} microseconds, four take {grouped[1]:.0f}",
        f"reach {shares[0]:.0%} of the measured memory bandwidth".replace("%", " %"),
        f"reach {shares[1]:.0%} of the measured arithmetic limit".replace("%", " %"),
        f"take {ours:.0f} microseconds where FlashAttention 3 takes {theirs:.0f}",
        f"takes {window:.0f} microseconds, the whole context {whole:.0f}",
        f"cache: {rows['most_time_us']['rope_and_store_kv_kernel']:.0f} microseconds of the step",
        f"{rows['most_time_us']['rms_norm_kernel']:.0f} microseconds of the step",
        f"gate takes {large['most_time_us']['gated_kernel']:.0f} microseconds of a step of 256",
        f"{rows['device_pieces_per_step']:.0f} in all for 28 layers",
        f"{per_s:,.0f} prompt tokens/s of Qwen3-0.6B, {1e6 / per_s:.1f} microseconds a token; "
        f"its 112 KiB take {token_us:.1f} microseconds",
        f"read at {reading:.0%} of".replace("%", " %"),
    ):
        assert said in TEXT


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "num_tokens", "said"),
    [(32, 32, 256, "256 tokens take 134 MB"), (28, 8, 40_960, "4.4 GiB for one request of 40,960")],
)
def test_kv_memory_is_what_the_layout_takes(
    num_layers: int, num_kv_heads: int, num_tokens: int, said: str
) -> None:
    cache = KVLayout([KVSpec(num_kv_heads, 128)] * num_layers, KVCacheFormat(torch.float16), 16)
    num_bytes = sum(cache.layer_bytes(i) for i in range(num_layers)) * num_tokens // 16
    assert said in TEXT
    sizes = {f"{num_bytes / 1e6:.0f} MB", f"{num_bytes / 2**30:.1f} GiB"}
    assert any(size in said for size in sizes)


def test_lines_are_as_many_as_it_says() -> None:
    said = re.search(
        r"about ([\d,]+) of Python and ([\d,]+) of C\+\+, tests not counted: the scheduler and its "
        r"KV cache ([\d,]+), workers with their kernels on CPU and CUDA ([\d,]+);",
        TEXT,
    )
    assert said is not None
    counted = (
        lines_of("nanocore"),
        lines_of("nanocore", suffixes=(".h", ".cpp")),
        lines_of(
            "nanocore/kv_cache", "nanocore/engine_core/scheduling", "nanocore/engine_core/policy"
        ),
        lines_of("nanocore/worker", "nanocore/kernels"),
    )
    for words, count in zip(said.groups(), counted, strict=True):
        assert int(words.replace(",", "")) == pytest.approx(count, rel=TOLERANCE)


def test_a_plan_to_which_nothing_happens_has_as_many_bytes_as_it_says() -> None:
    said = re.search(r"a plan is (\d+) bytes for a decode step", TEXT)
    assert said is not None
    for num_rows in (1, 8):
        scheduler, executor = make_scheduler()
        for i in range(num_rows):
            scheduler.add(make_request(i + 1, [10 * i, 1], 8))
        deliveries = Deliveries()
        plan = [deliveries.step(scheduler, executor) for _ in range(2)][-1]
        assert plan.num_tokens == num_rows
        assert len(msgspec.msgpack.encode(plan)) == int(said[1])
