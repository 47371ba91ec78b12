"""What a configuration may be: types and ranges of every field, and defaults that give way."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, get_type_hints

import msgspec
import pytest

from nanocore.engine_core.cli import build_parser, parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.parameters import CUDA_SIZES, Sizes
from nanocore.protocol.errors import ConfigError
from nanocore.worker.rank_messages import WorkerConfig

WHOLE = {
    "tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens",
    "max_num_queued_bytes",
    "long_prefill_token_threshold", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "seed", "max_num_clients",
}  # fmt: skip
REAL = {
    "priority_aging_s",
    "shutdown_timeout",
    "step_timeout_s",
    "watermark",
    "target_itl_ms",
    "gpu_memory_utilization",
}
SWITCHES = {
    "batch_invariant", "enforce_eager", "async_scheduling", "enable_prefix_caching",
    "salt_prefix_cache_by_session", "standby", "disable_log_stats",
}  # fmt: skip
CHOICES = {
    "load_format", "device", "dtype", "attention_backend", "quantization",
    "activation_quantization", "scheduling_policy", "kv_cache_dtype", "log_format",
}  # fmt: skip
TEXTS = {
    "model", "revision", "merge_lora", "listen", "curve_dir", "step_trace", "kv_events_endpoint",
    "kv_events_replay_endpoint", "kv_events_topic",
}  # fmt: skip
OBJECTS = {"hf_overrides", "override_generation_config", "speculative_config"}
OPTIONAL = {
    "model", "revision", "merge_lora", "quantization", "async_scheduling", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
    "kv_cache_memory_bytes", "curve_dir", "max_num_clients", "step_trace", "kv_events_endpoint",
    "kv_events_replay_endpoint",
}  # fmt: skip
MINUS_ONE = {"max_logprobs"}  # where it is no limit
NO_VALUES: list[Any] = [b"1", [1], {}, (), object(), 1j, math.nan, -math.inf, "foo\0", 10**30, -1]
NO_OBJECTS: list[Any] = [{1: 2}, {"a": b"1"}, {"a": math.nan}, {"a": (1,)}, {"a": object()}]
WRONG: list[tuple[set[str], list[Any]]] = [
    (WHOLE, [*NO_VALUES, True, False, "foo", "7", "", 7.0, 1.5]),
    (MINUS_ONE, [v for v in NO_VALUES if v != -1] + [-2, True, False, "foo", "7", "", 7.0, 1.5]),
    (REAL, [*NO_VALUES, True, False, "foo", "0.5", ""]),
    (SWITCHES, [*NO_VALUES, 0, 1, "true", ""]),
    (CHOICES, [*NO_VALUES, True, 1, "foo", ""]),
    (TEXTS, [*NO_VALUES, True, 1, 0.5]),
    (OBJECTS, [v for v in NO_VALUES if v != {}] + [True, "", "{}", *NO_OBJECTS]),
]
WRONG_BY_NAME = {name: values for names, values in WRONG for name in sorted(names)}


FLAGS = [a.option_strings[0] for a in build_parser()._actions if a.dest in WRONG_BY_NAME]
SIZES = {field.name for field in fields(Sizes)}
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("1G", 1 << 30),
        ("8GiB", 8 << 30),
        ("512MB", 512 << 20),
        ("1T", 1 << 40),
        ("1t", 10**12),
    ],
)
def test_sizes_may_be_written_as_in_vllm(text: str, number: int) -> None:
    assert parse_config(["--max-num-queued-bytes", text]).max_num_queued_bytes == number


@pytest.mark.parametrize("text", ["1.5K", "k", "1kk", "1.2345k", "4 k", "-1k", "1GiBs", "8kb"])
def test_a_size_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number") as caught:
        parse_config([f"--max-num-queued-bytes={text}"])
    assert ("GiB or GB" in str(caught.value)) == text[0].isdigit()


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


def test_overrides_are_a_json_object_of_any_depth_that_can_be_read() -> None:
    nested: dict[str, Any] = {}
    for _ in range(10**5):
        nested = {"a": nested}
    with pytest.raises(ConfigError, match=r"^--hf-overrides .*: must be a JSON object such as "):
        EngineConfig(hf_overrides=nested)
    with pytest.raises(ConfigError, match=r"^--hf-overrides .*: must be a JSON object such as "):
        parse_config(["--hf-overrides", '{"a": ' * 10**5 + "1" + "}" * 10**5])


@pytest.mark.parametrize("text", ["", "foo", "[]", "1", "null", "{", '{"a": NaN}', "{'a': 1}"])
def test_a_flag_that_is_no_json_object_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'must be a JSON object such as \{"') as caught:
        parse_config([f"--hf-overrides={text}"])
    assert str(caught.value).startswith(
        f"--hf-overrides {text.replace('null', 'None') or repr('')}:"
    )


def test_the_workers_part_has_every_parameter_of_the_same_name_and_no_other() -> None:
    """A field of WorkerConfig that no parameter is named after is an error at once."""
    config = EngineConfig(
        load_format="dummy",
        hf_overrides={"a": 1},
        merge_lora="adapter",
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        quantization="int8",
        activation_quantization="none",
        kv_cache_dtype="int8",
        block_size=32,
        max_num_seqs=3,
        max_num_batched_tokens=17,
        max_logprobs=5,
        gpu_memory_utilization=0.25,
        seed=7,
        kv_cache_memory_bytes=99,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        enforce_eager=True,
        batch_invariant=True,
        async_scheduling=True,
        log_format="json",
    )
    worker = msgspec.structs.asdict(config.worker_config("folder", 5))
    assert (worker.pop("folder"), worker.pop("max_model_len")) == ("folder", 5)
    assert worker == {name: getattr(config, name) for name in worker}
    defaults = msgspec.structs.asdict(EngineConfig().worker_config("", 2))
    same = [name for name, value in worker.items() if value == defaults[name]]
    assert same == ["speculative_config"]  # stages refuse it


def test_what_a_worker_is_told_is_of_the_parameters_own_types() -> None:
    workers, engines = get_type_hints(WorkerConfig), get_type_hints(EngineConfig)
    given = {"folder", "max_model_len", "device", "dtype", "attention_backend"}  # plain str
    for name in workers.keys() - given - SIZES:
        assert workers[name] == engines[name], name
    for name in SIZES:
        assert workers[name] | None == engines[name], name


def test_the_parts_take_the_devices_sizes_where_none_are_given() -> None:
    config = EngineConfig().for_device("cuda")
    worker, scheduler = config.worker_config("", 2), config.scheduler_config(2)
    assert {name: getattr(worker, name) for name in SIZES} == asdict(config.sizes)
    assert scheduler.max_num_batched_tokens == CUDA_SIZES.max_num_batched_tokens
