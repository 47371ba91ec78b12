"""docs/concepts.md: its programs print what it says, its steps name tests, its counts hold."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import msgspec
import pytest

from tests.fakes import Deliveries, make_request, make_scheduler

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "concepts.md").read_text("utf-8")
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
STEPS = re.split(r"^## (?=\d)", PAGE.partition("\n## Questions")[0], flags=re.MULTILINE)[1:]
NUM_STEPS = 8
NUM_QUESTIONS = range(15, 26)
TOLERANCE = 0.05
"""Of lines that are counted: enough for a day's work."""


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
    ids=[title(step) for step in STEPS if PROGRAM.search(step) and "LLM(" not in step],
)
def test_a_program_prints_what_the_page_says(source: str, printed: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, {"__name__": "__main__"})
    assert out.getvalue() == printed


@pytest.mark.campaign
def test_the_program_that_launches_an_engine_does_too() -> None:
    ((source, printed),) = engine_programs()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, {"__name__": "__main__"})
    assert out.getvalue() == printed


def test_every_program_is_run_here() -> None:
    assert len(PROGRAM.findall(PAGE)) == PAGE.count("```python") == 6


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


def test_there_are_eight_steps_and_some_twenty_questions() -> None:
    assert [int(step.partition(".")[0]) for step in STEPS] == list(range(1, NUM_STEPS + 1))
    questions = PAGE.partition("\n## Questions")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\*\*[^*]*\?\*\*", questions, re.MULTILINE)) in NUM_QUESTIONS


def test_lines_are_as_many_as_it_says() -> None:
    text = " ".join(PAGE.split())
    said = re.search(
        r"about ([\d,]+) of Python and ([\d,]+) of C\+\+, tests not counted: the scheduler and its "
        r"KV cache ([\d,]+), workers with their kernels on CPU and CUDA ([\d,]+);",
        text,
    )
    assert said is not None
    counted = (
        lines_of("nanocore"),
        lines_of("nanocore", suffixes=(".h", ".cpp")),
        lines_of("nanocore/kv_cache", "nanocore/engine_core/scheduling"),
        lines_of("nanocore/worker", "nanocore/kernels"),
    )
    for words, count in zip(said.groups(), counted, strict=True):
        assert int(words.replace(",", "")) == pytest.approx(count, rel=TOLERANCE)


def test_a_plan_to_which_nothing_happens_has_as_many_bytes_as_it_says() -> None:
    said = re.search(r"differences: (\d+) bytes for a decode step", " ".join(PAGE.split()))
    assert said is not None
    for num_rows in (1, 8):
        scheduler, executor = make_scheduler()
        for i in range(num_rows):
            scheduler.add(make_request(i + 1, [10 * i, 1], 8))
        deliveries = Deliveries()
        plan = [deliveries.step(scheduler, executor) for _ in range(2)][-1]
        assert plan.num_tokens == num_rows
        assert len(msgspec.msgpack.encode(plan)) == int(said[1])
