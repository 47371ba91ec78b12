"""How the JSON-Schema-Test-Suite's cases come out may only get better.

The figures of `schema_suite.json` are of jsonschema's version that `schema_suite` names; its source
package is downloaded once, and none of it is kept here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.structured.schema_suite import FIGURES, VERSION, measure, outcomes, spellings

EXPLAINED = {
    "optional/format/date.json": (2, "29 February is taken in any year"),
    "optional/format/date-time.json": (2, "a leap second is taken at any minute"),
    "optional/format/time.json": (10, "a leap second is taken at any minute"),
    "optional/ecmascript-regex.json": (1, r"\\S matches U+FEFF, which ECMAScript calls a space"),
}
"""What is wrongly possible: how many tests of which files, and why."""


def recorded() -> dict[str, dict[str, int]]:
    figures: dict[str, dict[str, int]] = json.loads(FIGURES.read_text())
    return figures


def test_all_that_is_wrongly_possible_is_explained() -> None:
    wrong = {
        name: counts["invalid_but_possible"]
        for name, counts in recorded().items()
        if "invalid_but_possible" in counts
    }
    assert wrong == {name: count for name, (count, _) in EXPLAINED.items()}


def test_each_outcome_is_told_from_the_others() -> None:
    tests = [
        {"data": {"b": 2.0, "a": 1}, "valid": True},
        {"data": {"a": "1"}, "valid": False},
        {"data": {"a": "1"}, "valid": True},
        {"data": {"a": 1}, "valid": False},
    ]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
    assert [*outcomes({"schema": schema, "tests": tests})] == [
        "right",
        "right",
        "valid_but_impossible",
        "invalid_but_possible",
    ]
    assert [*outcomes({"schema": {"not": schema}, "tests": tests})] == ["refused"] * 4


def test_a_value_is_spelled_in_each_order_of_its_properties() -> None:
    value = [{"a": 1.0, "b": {"d": None, "c": "é"}}]
    assert sorted({*spellings(value)}) == sorted(
        f"[{{{','.join(members)}}}]"
        for one in ("1", "1.0")
        for inner in ('{"c":"é","d":null}', '{"d":null,"c":"é"}')
        for members in ((f'"a":{one}', f'"b":{inner}'), (f'"b":{inner}', f'"a":{one}'))
    )


@pytest.mark.campaign
@pytest.mark.timeout(300)  # it has a package downloaded
def test_no_file_of_the_suite_comes_out_worse(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """At least as many tests right, and no more impossible or possible that should not be."""
    assert request.config.cache is not None
    folder = suite_folder(request.config.cache.mkdir("schema_suite"), tmp_path)
    measured = measure(folder)
    assert measured.keys() == recorded().keys()
    worse = {
        name: {"was": before, "is": measured[name]}
        for name, before in recorded().items()
        if any(
            measured[name].get(outcome, 0) > before.get(outcome, 0)
            for outcome in ("valid_but_impossible", "invalid_but_possible")
        )
        or measured[name].get("right", 0) < before.get("right", 0)
    }
    assert worse == {}


def suite_folder(downloads: Path, folder: Path) -> Path:
    """The suite's tests, taken out of jsonschema's source package; skips if that cannot be had."""
    archive = downloads / f"jsonschema-{VERSION}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--no-binary", "jsonschema", "--dest", str(downloads), f"jsonschema=={VERSION}"]
        done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"jsonschema's source package cannot be had: {done.stderr.strip()[-300:]}")
    with tarfile.open(archive) as package:
        package.extractall(folder, filter="data")
    return folder / f"jsonschema-{VERSION}" / "json" / "tests"
