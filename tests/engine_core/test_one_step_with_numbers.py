"""ARCHITECTURE.md's page "One step, with numbers" is executed, cell by cell."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine_core.scheduler_checks import check_plan
from tests.fakes import Deliveries, expected_tokens, make_request, make_scheduler

PAGE = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
SHARED = list(range(1, 9))
PROMPTS = {"A": [*SHARED, 9], "B": [*SHARED, 20, 21], "C": list(range(30, 44))}
MAX_TOKENS = {"A": 4, "B": 8, "C": 3}
BEFORE_STEP = {"A": 1, "B": 1, "C": 2}


def page_section() -> str:
    start = PAGE.index("## One step, with numbers")
    return PAGE[start : PAGE.index("\n## ", start)]


def page_rows() -> list[list[str]]:
    """The table's cells; what happens in each step is a list behind it."""
    lines = [line for line in page_section().splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_says_what_the_scheduler_does() -> None:
    scheduler, executor = make_scheduler(
        block_size=4, num_blocks=8, max_num_batched_tokens=12, max_num_seqs=4, max_model_len=64
    )
    deliveries = Deliveries()
    handles = {"A": 1, "B": 2, "C": 3}
    names = {handle: name for name, handle in handles.items()}
    rows: list[list[str]] = []
    while scheduler.num_requests or not rows:
        number = len(rows) + 1
        for name, step in BEFORE_STEP.items():
            if step == number:
                scheduler.add(make_request(handles[name], PROMPTS[name], MAX_TOKENS[name]))
        plan = scheduler.schedule()
        check_plan(scheduler, plan)
        step = scheduler.planned
        cells = dict.fromkeys("ABC", "")
        for chunk in step.scheduled():
            name = names[scheduler.running.request(chunk.row).handle]
            cells[name] = f"{chunk.num_computed} + {chunk.num_tokens}"
        for request in step.preempted:
            cells[names[request.handle]] = "preempted"
        blocks = [" ".join(map(str, scheduler.kv_cache.block_ids(handle))) for handle in (1, 2, 3)]
        free = str(scheduler.kv_cache.num_free_blocks)
        deliveries.take(scheduler, executor.execute(plan))
        ended = " ".join(names[request.handle] for request in scheduler.completed.finished)
        row = [str(number), *cells.values(), str(plan.num_tokens), *blocks, free, ended]
        rows.append(row)
    assert page_rows() == rows
    assert re.findall(r"^(\d+)\. ", page_section(), re.MULTILINE) == [row[0] for row in rows]
    for name, handle in handles.items():
        assert deliveries.tokens[handle] == expected_tokens(PROMPTS[name], MAX_TOKENS[name])


def test_the_page_names_the_numbers_it_starts_from() -> None:
    words = " ".join(page_section().split())
    assert "8 blocks of 4 tokens, a budget of 12 tokens" in words
    for name, prompt in PROMPTS.items():
        assert f"{name}: {len(prompt)} prompt tokens, max_tokens {MAX_TOKENS[name]}" in words
