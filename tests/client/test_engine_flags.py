"""Python arguments as flags of `nanocore-engine`: what they become, and what is refused at once."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import LLM, AsyncEngineClient, ConfigError
from nanocore.client.arguments import EngineArgument, engine_flags
from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.config import EngineConfig

NOT_LAUNCHED = {"listen", "curve_dir"}
FIELDS = {field.name: field for field in fields(EngineConfig) if field.name not in NOT_LAUNCHED}


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("model", "/models/x", ["--model=/models/x"]),
        ("model", Path("/models/x"), ["--model=/models/x"]),
        ("model", "--version", ["--model=--version"]),
        ("model", "", ["--model="]),
        ("model", None, []),
        ("max_num_seqs", 8, ["--max-num-seqs=8"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization=0.5"]),
        ("enable_prefix_caching", True, ["--enable-prefix-caching"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("seed", 0, ["--seed=0"]),
        ("seed", -1, ["--seed=-1"]),
        ("tp", 2, ["--tp=2"]),
        ("hf_overrides", {"a": {"b": [1.5, "é", None]}},
         ['--hf-overrides={"a": {"b": [1.5, "\\u00e9", null]}}']),
    ],
)  # fmt: skip
def test_an_argument_becomes_its_flag(name: str, value: EngineArgument, flags: list[str]) -> None:
    assert engine_flags({name: value}) == flags


def test_flags_keep_the_arguments_order() -> None:
    arguments: dict[str, EngineArgument] = {"b": 1, "a": None, "c_d": True, "e": "x y"}
    assert engine_flags(arguments) == ["--b=1", "--c-d", "--e=x y"]


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", [name for name, f in FIELDS.items() if "bool" in str(f.type)])
def test_every_switch_of_the_engine_can_be_turned_on_and_off(name: str, value: bool) -> None:
    assert getattr(parse_config(engine_flags({name: value})), name) is value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_num_seqs": 8, "max_num_batched_tokens": 64}, {}),
        ({"max_model_len": "auto", "dtype": "float32", "kv_cache_dtype": "int8"}, {}),
        ({"watermark": 0.25, "target_itl_ms": 50, "step_timeout_s": 1.5}, {}),
        ({"step_trace": Path("/t"), "model": Path("/m")}, {"step_trace": "/t", "model": "/m"}),
        ({"tp": 2, "pp": 1}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
        ({"hf_overrides": {"rope_scaling": {"factor": 2.0}, "b": [True, None]}}, {}),
        ({"hf_overrides": {}}, {}),
        (dict.fromkeys(FIELDS), {}),
    ],
)  # fmt: skip
def test_the_engine_understands_what_the_client_says(
    arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = parse_config(engine_flags(arguments))
    defaults = EngineConfig()
    for name, value in (expected or arguments).items():
        wanted = getattr(defaults, name) if value is None else value
        assert getattr(config, name) == wanted


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1,),
        {"a": b"1"},
        {"a": math.inf},
        b"8",
        Ellipsis,
        1 + 2j,
        "a\0b",
        "\ud800",
        Path("a\0b"),
    ],
    ids=repr,
)
def test_a_value_that_no_flag_can_have_is_refused_by_name_before_a_process_starts(
    value: Any,
) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs="):
        AsyncEngineClient.launch(max_num_seqs=value)


@pytest.mark.parametrize("name", ["listen", "curve_dir", "check", "parent_fd", "version", "help"])
def test_what_a_launched_engine_cannot_be_told_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*nanocore-engine|{name}=.*launcher"):
        LLM(**{name: "x"})


def test_a_name_that_is_no_flags_is_refused() -> None:
    with pytest.raises(ConfigError, match="'max num seqs'"):
        AsyncEngineClient.launch(**{"max num seqs": 8})


@pytest.mark.parametrize(
    "options",
    [
        {"model": 5},
        {"model": b"folder"},
        {"tokenizer": 5},
        {"tokenizer": b"folder"},
        {"start_timeout_s": "long"},
        {"start_timeout_s": 0},
        {"start_timeout_s": float("nan")},
        {"start_timeout_s": None},
    ],
    ids=str,
)
def test_the_launchs_own_arguments_are_checked_before_a_process_starts(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncEngineClient.launch(**options)


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--max-num-sequences=8", "--max-num-seqs"), ("--no-enforce-eagre", "--no-enforce-eager")],
)
def test_a_flag_that_does_not_exist_is_named_with_the_one_that_was_meant(
    flag: str, near: str
) -> None:
    name = flag.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"unknown: {name}; did you mean {near}\?"):
        parse_config([flag])
