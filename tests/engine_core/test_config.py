"""What a configuration may be: types and ranges of every field, and defaults that give way."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest

from nanocore.engine_core.cli import build_parser, parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import ConfigError

WHOLE = {
    "tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens",
    "long_prefill_token_threshold", "max_num_partial_prefills", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "seed", "max_num_clients",
}  # fmt: skip
REAL = {"step_timeout_s", "watermark", "target_itl_ms", "gpu_memory_utilization"}
SWITCHES = {
    "batch_invariant", "enforce_eager", "async_scheduling", "enable_prefix_caching",
    "salt_prefix_cache_by_session", "check",
}  # fmt: skip
CHOICES = {
    "load_format", "device", "dtype", "attention_backend", "quantization", "scheduling_policy",
    "kv_cache_dtype",
}  # fmt: skip
TEXTS = {
    "model", "revision", "listen", "curve_dir", "step_trace", "kv_events_endpoint",
    "kv_events_replay_endpoint", "kv_events_topic",
}  # fmt: skip
OPTIONAL = {
    "model", "revision", "quantization", "async_scheduling", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes",
    "curve_dir", "max_num_clients", "step_trace", "kv_events_endpoint",
    "kv_events_replay_endpoint",
}  # fmt: skip
NO_VALUES: list[Any] = [b"1", [1], {}, (), object(), 1j, math.nan, -math.inf, "foo\0", 10**30, -1]
WRONG: list[tuple[set[str], list[Any]]] = [
    (WHOLE, [*NO_VALUES, True, False, "foo", "7", "", 7.0, 1.5]),
    (REAL, [*NO_VALUES, True, False, "foo", "0.5", ""]),
    (SWITCHES, [*NO_VALUES, 0, 1, "true", ""]),
    (CHOICES, [*NO_VALUES, True, 1, "foo", ""]),
    (TEXTS, [*NO_VALUES, True, 1, 0.5]),
]
WRONG_BY_NAME = {name: values for names, values in WRONG for name in sorted(names)}


FLAGS = [a.option_strings[0] for a in build_parser()._actions if a.dest in WRONG_BY_NAME]
SWITCH_FLAGS = {"--" + name.replace("_", "-") for name in SWITCHES}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_every_field_is_in_the_table_of_this_test() -> None:
    assert {field.name for field in fields(EngineConfig)} == WRONG_BY_NAME.keys()


@pytest.mark.parametrize("name", WRONG_BY_NAME)
def test_a_value_of_another_type_is_refused_by_its_flag(name: str) -> None:
    for value in WRONG_BY_NAME[name] + [None] * (name not in OPTIONAL):
        if (name, value) == ("target_itl_ms", 10**30):
            continue  # milliseconds without end
        with pytest.raises(ConfigError, match=f"^{flag_of(name)} .*: must be "):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("name", sorted(WHOLE | REAL))
@pytest.mark.parametrize("text", ["", "foo", "1e400", "-1e400", "nan", "0x10", "-5", "9" * 40])
def test_a_flag_says_what_a_bad_value_should_have_been(name: str, text: str) -> None:
    if (name, text) == ("target_itl_ms", "1e400"):
        text = "0"  # no target is an infinite one
    if (name, text) == ("target_itl_ms", "9" * 40):
        text = "-0.1"
    with pytest.raises(ConfigError) as caught:
        parse_config([f"{flag_of(name)}={text}"])
    message = str(caught.value)
    with suppress(ValueError):
        text = str(float(text) if name in REAL else int(text))
    assert message.startswith(f"{flag_of(name)} {text or repr('')}: must be a ")
    assert re.search(r"number (from|above) [\d.]+", message)
    assert "\n" not in message


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", ["", "=fo\0o"])
def test_a_flag_speaks_of_itself_and_not_of_the_parsers_functions(flag: str, value: str) -> None:
    if flag in SWITCH_FLAGS and not value:
        parse_config([flag])
        return
    with pytest.raises(ConfigError) as caught:
        parse_config([flag + value])
    assert flag in str(caught.value)
    assert not re.search(r"invalid _|_whole|_real|invalid (int|float)", str(caught.value))


@pytest.mark.parametrize(
    ("given", "num_seqs", "num_tokens"),
    [
        ({}, 256, 2048),
        ({"max_num_batched_tokens": 128}, 128, 128),
        ({"max_num_batched_tokens": 1}, 1, 1),
        ({"max_num_batched_tokens": 4096}, 256, 4096),
        ({"max_num_seqs": 5000}, 5000, 5000),
        ({"max_num_seqs": 7}, 7, 2048),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 7}, 7, 7),
    ],
)
def test_a_default_gives_way_to_what_is_given(
    given: dict[str, int], num_seqs: int, num_tokens: int
) -> None:
    config = EngineConfig(**given)  # type: ignore[arg-type]
    for sizes in (config.sizes, config.for_device("cpu").sizes):
        assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (num_seqs, num_tokens)
    on_cuda = config.for_device("cuda").sizes
    assert on_cuda.max_num_batched_tokens >= on_cuda.max_num_seqs


def test_two_flags_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 7: .*--max-num-seqs \(8\)"):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=7)
