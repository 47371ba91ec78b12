"""docs/coming-from.md: what it says of our flags, and that those spelled as vLLM's are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.sampling import SamplingParams
from tests.docs.blocks import ROOT
from tools.reference.parsers import commands

PAGE = (ROOT / "docs" / "coming-from.md").read_text("utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VLLM = json.loads((Path(__file__).parent / "vllm_flags.json").read_text("utf-8"))


def flags_of(*names: str) -> set[str]:
    return {
        option
        for name in names
        for action in commands()[name][0]._actions
        for option in action.option_strings
        if action.help != "==SUPPRESS=="
    }


def rows(heading: str) -> list[list[str]]:
    """Of all tables below it."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[1] != "here"]


@pytest.mark.parametrize("heading", ["vLLM", "SGLang", "llama.cpp: `llama-server`", "Ollama"])
def test_each_row_names_flags_that_we_have_or_says_that_there_is_none(heading: str) -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    assert rows(heading)
    for theirs, here, _ in rows(heading):
        assert here == "none" or FLAG.findall(here), theirs
        assert set(FLAG.findall(here)) <= ours, theirs


def test_every_flag_that_is_spelled_as_vllms_is_listed_as_such() -> None:
    ours = flags_of("nanocore serve", "nanocore-engine")
    theirs = {f"--{name}" for kind in ("engine", "server") for name in VLLM[kind]}
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
    assert by_flag["--max-num-seqs"] == f"{cpu.max_num_seqs}"
    budgets = f"{cpu.max_num_batched_tokens:,}, and {cuda.max_num_batched_tokens:,} on CUDA"
    assert by_flag["--max-num-batched-tokens"].startswith(budgets)
    assert by_flag["--max-logprobs"].startswith(f"{config.max_logprobs};")
    assert config.max_num_partial_prefills == config.long_prefill_token_threshold == 0
    queued = f"{config.max_num_queued_reqs:,}, and "
    assert next(d for _, here, d in rows("Ollama") if "queued-reqs" in here).startswith(queued)
    assert SamplingParams().temperature == 1
    assert (SamplingParams().top_p, SamplingParams().min_p) == (1, 0)
