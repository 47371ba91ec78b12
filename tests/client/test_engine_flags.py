"""Python arguments as flags of `nanocore-engine`."""

from __future__ import annotations

import pytest

from nanocore.client.launcher import EngineArgument, _flags


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("model", "/models/x", ["--model", "/models/x"]),
        ("max_num_seqs", 8, ["--max-num-seqs", "8"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("enable_prefix_caching", True, ["--enable-prefix-caching"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("seed", 0, ["--seed", "0"]),
        ("model", "", ["--model", ""]),
        ("model", None, []),
    ],
)
def test_an_argument_becomes_its_flag(name: str, value: EngineArgument, flags: list[str]) -> None:
    assert _flags({name: value}) == flags


def test_flags_keep_the_arguments_order() -> None:
    arguments: dict[str, EngineArgument] = {"b": 1, "a": None, "c_d": True, "e": "x y"}
    assert _flags(arguments) == ["--b", "1", "--c-d", "--e", "x y"]
