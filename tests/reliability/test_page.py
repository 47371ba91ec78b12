"""RELIABILITY.md names tests that exist, for each of its promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "RELIABILITY.md").read_text("utf-8")
PROMISES = re.split(r"^## \d+\. ", PAGE, flags=re.MULTILINE)[1:]
NUM_PROMISES = 12
FAULTS = ("lost", "repeated", "different")


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test) for each test that is named behind a link to a file."""
    found = []
    for item in text.split("\n- ")[1:]:
        files = re.findall(r"\]\((tests/[\w/]+\.py)\)", item)
        found += [(file, test) for file in files for test in re.findall(r"`(test_\w+)`", item)]
    return found


def test_every_test_that_is_named_exists() -> None:
    named = named_tests(PAGE)
    assert len(named) > 3 * NUM_PROMISES
    missing = [
        f"{file}: {test}"
        for file, test in named
        if not re.search(rf"\bdef {test}\(", (ROOT / file).read_text("utf-8"))
    ]
    assert missing == []


def test_every_promise_has_tests() -> None:
    numbers = re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, NUM_PROMISES + 1)]
    assert all(named_tests(promise) for promise in PROMISES)


def test_the_table_is_that_of_the_last_measurement() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "resume.json").read_text())
    written = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.split("\n## Figures\n")[1].splitlines()
        if line.startswith("| tp ")
    ]
    assert written == [
        [
            name,
            str(figures["num_kills"]),
            f"{figures['num_tokens']:,}",
            ", ".join(str(figures[f"tokens_{fault}"]) for fault in FAULTS),
            *(
                "{median:,.0f} ({p90:,.0f}, {max:,.0f})".format(**figures[part])
                for part in ("gap_ms", "detection_ms", "start_ms", "recomputation_ms")
            ),
        ]
        for name, figures in report["engines"].items()
    ]
    assert all(
        figures[f"tokens_{x}"] == 0 for figures in report["engines"].values() for x in FAULTS
    )


def test_every_test_beside_bystanders_holds_a_promise() -> None:
    """What is in this folder is on the page."""
    here = {
        test
        for file in Path(__file__).parent.glob("test_*.py")
        if file.name != Path(__file__).name
        for test in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE)
    }
    assert here - {test for _, test in named_tests(PAGE)} == set()
