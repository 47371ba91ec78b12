"""docs/reference/ against the code, of which it is made."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nanocore.cli import main
from tools.reference.__main__ import FEATURES, FOLDER, pages
from tools.reference.features import evidence, features, features_page
from tools.reference.parsers import commands, parser_of

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="made with 3.11: other argparses word some help otherwise",
)
def test_the_reference_is_what_the_code_says() -> None:
    written = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run python -m tools.reference"
    assert FEATURES.read_text("utf-8") == features_page(), "run python -m tools.reference"


def test_every_command_is_in_it() -> None:
    without_page = "bench", "run"  # of benchmarks each has one; run is another name of chat
    subcommands = {f"nanocore {name}" for name in main._SUBCOMMANDS if name not in without_page}
    benchmarks = {f"nanocore bench {name}" for name in main._BENCHMARKS}
    scripts = {"nanocore-engine", "nanocore-keygen", "nanocore-conformance"}
    assert commands().keys() == subcommands | benchmarks | scripts


@pytest.mark.parametrize("name", commands())
def test_every_flag_has_a_line_that_says_what_it_does(name: str) -> None:
    parser, _ = commands()[name]
    page = (FOLDER / f"{name.replace(' ', '-')}.md").read_text("utf-8")
    items = page.split("\n- ")[1:]
    for action in parser._actions:
        if (
            not action.option_strings
            or action.help == "==SUPPRESS=="
            or {"--help", "--version"}.intersection(action.option_strings)
        ):
            continue
        flag = action.option_strings[0]
        (line,) = [one for one in items if one.startswith(f"`{flag}`")]
        said = re.sub(r"\((?:default: \S+|repeatable)\)", "", line.partition(": ")[2])
        assert len(said.split()) >= 2, f"{flag} of {name} says nothing"


def test_a_command_that_parses_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_command.py").write_text("def run(arguments):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match="parses no arguments"):
        parser_of("silent_command:run")


def test_every_test_that_is_said_to_show_two_features_is_in_the_tree() -> None:
    missing = []
    for one in evidence().values():
        file, _, function = one.test.partition("::")
        defined = re.compile(rf"^(?:async )?def {re.escape(function)}\(", re.MULTILINE)
        if not (ROOT / file).is_file() or not defined.search((ROOT / file).read_text("utf-8")):
            missing.append(one.test)
    assert missing == []


def test_features_that_are_said_to_be_together_are_two_that_there_are() -> None:
    assert {len(pair) for pair in evidence()} == {2}
    assert {key for pair in evidence() for key in pair} <= features().keys()
    assert not {one.test for one in evidence().values() if one.test.startswith("tests/gpu/")}
