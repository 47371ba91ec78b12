"""Flags and configuration say the same things."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nanocore.engine_core.cli import build_parser, parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.endpoint import TcpAddress
from nanocore.protocol.errors import ConfigError

EVENTS = ["--kv-events-endpoint", "ipc:///x/events.sock"]


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    settings = {field.name for field in fields(EngineConfig)}
    flags = {action.dest for action in build_parser()._actions}
    assert flags - settings == {"help", "version", "check", "parent_fd"}
    assert settings <= flags


def test_json_is_how_a_check_is_printed() -> None:
    assert parse_config(["--check"]) == EngineConfig()


def test_check_is_a_command_and_no_setting() -> None:
    assert parse_config(["--check"]) == EngineConfig()
    with pytest.raises(TypeError, match="check"):
        EngineConfig(check=True)  # type: ignore[call-arg]


def test_help_has_words_for_every_parameter_under_a_heading() -> None:
    shown = build_parser().format_help()
    for field in fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        after = shown.split("exit codes")[0].rpartition(f"  {flag}")[2]
        words = after.partition("\n")[2] if "  " not in after.split("\n")[0].strip() else after
        assert words.strip()
        assert not words.lstrip().startswith("--"), flag


@pytest.mark.parametrize("name", ["flash", "flash-attn", "flash_attn", "FLASH_ATTN"])
def test_flash_attn_has_the_names_that_others_give_it(name: str) -> None:
    assert parse_config(["--attention-backend", name]).attention_backend == "flash"


@pytest.mark.parametrize("flags", [["--device", "cpu-attn"], ["--scheduling-policy", "FCFS"]])
def test_no_other_choice_has_such_names(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="invalid choice"):
        parse_config(flags)


def test_no_flags_is_the_default_configuration() -> None:
    assert parse_config([]) == EngineConfig()


def test_flags_reach_their_settings() -> None:
    config = parse_config(
        ["--max-num-seqs", "7", "--no-enable-prefix-caching", "--dtype", "float32"]
    )
    assert (config.max_num_seqs, config.enable_prefix_caching, config.dtype) == (
        7,
        False,
        "float32",
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seq", "7"], "max-num-seq"),  # abbreviations are typos
        (["--block-size", "0"], "--block-size 0"),
        (["--kv-cache-memory-bytes", "0"], "--kv-cache-memory-bytes 0"),
        (["--max-num-clients", "0"], "--max-num-clients 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--max-model-len", "1"], "--max-model-len 1"),
        (["--long-prefill-token-threshold", "-1"], "--long-prefill-token-threshold -1"),
        (["--listen", "ipc://relative/engine.sock"], "absolute"),
        (["--listen", "tcp://*:5555", "--curve-dir", "/k"], "does not say where to listen"),
        (["--listen", "tcp://127.0.0.1", "--curve-dir", "/k"], "needs a port"),
        (["--listen", "tcp://localhost:5555", "--curve-dir", "/k"], "IP address"),
        (["--curve-dir", "/k"], "--curve-dir /k: keys are for --listen tcp://"),
        (["--listen", "ipc:///x/e.sock", "--curve-dir", "/k"], "guarded by its directory's mode"),
        (["--kv-events-endpoint", "tcp://*:5557"], "only ipc"),
        (["--kv-events-replay-endpoint", "ipc:///x/r.sock"], "it needs --kv-events-endpoint"),
        (["--kv-events-topic", "kv"], "--kv-events-topic kv: .*it needs --kv-events-endpoint"),
        ([*EVENTS, "--no-enable-prefix-caching"], "which prefixes are cached"),
        ([*EVENTS, "--listen", "ipc:///x/events.sock"], "is --listen's endpoint"),
        ([*EVENTS, "--listen", "ipc:///x/events.ipc"], "differs from it in the suffix only"),
        (
            [*EVENTS, "--kv-events-replay-endpoint", "ipc:///x/events.sock"],
            "--kv-events-replay-endpoint .*is --kv-events-endpoint's",
        ),
    ],
)
def test_bad_values_are_named(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(flags)


def test_tcp_without_keys_is_refused_in_three_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(["--listen", "tcp://127.0.0.1:5555"])
    what, keys, instead = str(caught.value).splitlines()
    assert what.startswith("--listen tcp://127.0.0.1:5555")
    assert "--curve-dir DIR" in what
    assert "`nanocore-keygen DIR`" in keys
    assert "`nanocore-keygen DIR --client NAME --out FOLDER`" in keys
    assert "--listen ipc:///path/engine.sock" in instead


def test_tcp_with_keys_is_accepted_beside_kv_events_on_ipc() -> None:
    config = parse_config(["--listen", "tcp://[::1]:5555", "--curve-dir", "/keys", *EVENTS])
    assert config.address == TcpAddress("::1", 5555)
    assert config.curve_dir == "/keys"
