"""docs/coming-from.md: what it says of our flags, and that what it calls theirs is theirs.

upstream_flags.json has all names of flags, options and variables of each engine, at the version
that the page names: made from what vLLM and SGLang publish, and llama.cpp's and Ollama's sources.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nanocore.cli import main
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.sampling import SamplingParams
from nanocore.system.other_engines import IGNORED, OTHER_NAMES
from tests.docs.blocks import ROOT
from tools.reference.parsers import commands

PAGE = (ROOT / "docs" / "coming-from.md").read_text("utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
CODE = re.compile(r"`([^`]+)`")
UPSTREAM = json.loads((Path(__file__).parent / "upstream_flags.json").read_text("utf-8"))
OLDER = {"--swap-space", "--mlock", "--mmap", "--no-mmap"}
"""Flags of earlier releases, which people still type."""
HEADINGS = {
    "vLLM": "vLLM",
    "SGLang": "SGLang",
    "llama.cpp: `llama-server`": "llama-server",
    "Ollama": "Ollama",
}
"""Of the page, and of upstream_flags.json."""


def flags_of(*names: str) -> set[str]:
    return {
        option
        for name in names
        for action in commands()[name][0]._actions
        for option in action.option_strings
        if action.help != "==SUPPRESS=="
    }


def rows(heading: str) -> list[list[str]]:
    """[theirs, ours, what differs] of each row of the tables below it."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row if len(row) == 3 else [row[0], *row] for row in cells]  # of two: spelled the same
    return [row for row in rows if row[2] != "what differs"]


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_row_names_flags_that_we_have_or_says_that_there_is_none(heading: str) -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    assert rows(heading)
    for theirs, here, _ in rows(heading):
        programs = [code for code in CODE.findall(here) if code.startswith("nanocore ")]
        assert here == "none" or FLAG.findall(here) or programs, theirs
        assert set(FLAG.findall(here)) <= ours, theirs
        names = {*commands(), *(f"nanocore {name}" for name in main._SUBCOMMANDS)}
        assert {" ".join(code.split()[:2]) for code in programs} <= names


@pytest.mark.parametrize("heading", HEADINGS)
def test_what_each_row_calls_theirs_is_theirs_at_the_version_that_is_named(heading: str) -> None:
    upstream = UPSTREAM[HEADINGS[heading]]
    assert upstream["version"] in " ".join(PAGE.split("\n## ")[0].split())
    known = {*upstream["names"], *upstream.get("environment", ())}
    for theirs, _, _ in rows(heading):
        names = [code for code in CODE.findall(theirs) if not re.match(r"/|ollama ", code)]
        assert set(names) <= known, theirs


def test_what_the_program_takes_for_one_of_our_flags_the_page_does_too() -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    found = [row for heading in HEADINGS for row in rows(heading)]
    for theirs, meant in OTHER_NAMES.items():
        assert meant in ours
        assert theirs not in ours
        assert any(
            {theirs} & {*CODE.findall(there), *CODE.findall(differs)}
            and {meant} & {*CODE.findall(here), *CODE.findall(differs)}
            for there, here, differs in found
        ), theirs


def test_every_flag_that_is_ignored_is_one_of_theirs_and_is_listed() -> None:
    there = {name for engine in UPSTREAM.values() for name in engine["names"]}
    table = [row for heading in HEADINGS for row in rows(heading)]
    listed = {code for row in table for code in CODE.findall(row[0])}
    assert {*IGNORED} - OLDER <= there & listed
    assert {*CODE.findall(PAGE)} >= OLDER


def test_every_flag_that_is_spelled_as_vllms_is_listed_as_such() -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    theirs = {name for name in UPSTREAM["vLLM"]["names"] if name.startswith("--")}
    same = {here.strip("`") for there, here, _ in rows("vLLM") if there == here}
    assert same == ours & theirs


def test_what_is_listed_as_missing_is_missing() -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    for theirs, here, _ in rows("vLLM"):
        if here == "none":
            assert not set(FLAG.findall(theirs)) & ours


def test_the_defaults_of_ours_that_it_names_are_ours() -> None:
    config = EngineConfig()
    cpu, cuda = config.for_device("cpu"), config.for_device("cuda")
    by_flag = {here.strip("`"): differs for there, here, differs in rows("vLLM") if there == here}
    assert by_flag["--block-size"].endswith(f"{cpu.block_size}, and {cuda.block_size} on CUDA")
    assert by_flag["--max-num-seqs"].startswith(f"{cpu.max_num_seqs};")
    budgets = f"{cpu.max_num_batched_tokens:,}, and {cuda.max_num_batched_tokens:,} on CUDA"
    assert by_flag["--max-num-batched-tokens"].startswith(budgets)
    assert by_flag["--max-logprobs"].startswith(f"{config.max_logprobs};")
    assert config.long_prefill_token_threshold == 0
    queued = f"{config.max_num_queued_reqs:,}, and "
    assert next(d for _, here, d in rows("Ollama") if "queued-reqs" in here).startswith(queued)
    assert SamplingParams().temperature == 1
    assert (SamplingParams().top_p, SamplingParams().min_p) == (1, 0)
