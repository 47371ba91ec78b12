"""The command line of `nanocore serve`: whose a flag is, and what is refused before a start."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from nanocore.cli.engine_choice import JOIN_TIMEOUT_S, LAUNCH_TIMEOUT_S
from nanocore.cli.serve import supervisor
from nanocore.cli.serve.flags import ServeOptions, parse
from nanocore.protocol.errors import ConfigError, KeyFileError


def options(*arguments: str, environment: dict[str, str] | None = None) -> ServeOptions:
    return parse(list(arguments), {} if environment is None else environment)


def test_defaults() -> None:
    given = options()
    assert (given.host, given.port, given.uds, given.http_workers) == ("127.0.0.1", 8000, None, 1)
    assert given.engine.flags == ()
    assert given.app.api_keys == ()
    assert given.app.stored_responses_bytes > 0
    assert given.engine.start_timeout_s == LAUNCH_TIMEOUT_S
    assert (given.engine.max_restarts, given.standby) == (5, False)
    assert not given.server.access_log
    assert given.server.limits.max_header_bytes == 65536


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["folder"], ["--model=folder"]),
        (["--model", "folder"], ["--model=folder"]),
        (["folder", "--model", "folder"], ["--model=folder"]),
        (["--tp", "2"], ["--tp", "2"]),
        (["m", "--tp=2", "--port", "1", "--max-num-seqs", "8"],
         ["--model=m", "--tp=2", "--max-num-seqs", "8"]),
        (["--served-model-name", "a", "b", "--no-enable-prefix-caching"],
         ["--no-enable-prefix-caching"]),
        (["--standby", "--max-restarts", "0", "--no-standby"], []),
        (["--x", '{"a": -1}', "--y", "-5"], ["--x", '{"a": -1}', "--y", "-5"]),
    ],
)  # fmt: skip
def test_what_is_not_ours_is_the_engines(arguments: list[str], flags: list[str]) -> None:
    assert list(options(*arguments).engine.flags) == flags


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a", "--model", "b"], "two models, a and --model b"),
        (["--port", "65536"], "not an integer from 0 to 65535"),
        (["--port", "9" * 5000], "not an integer from 0 to 65535"),
        (["--http-workers", "0"], "not an integer from 1 to 256"),
        (["--max-body-bytes", "-1"], "not an integer"),
        (["--header-timeout", "0"], "above 0"),
        (["--header-timeout", "nan"], "not a number of seconds"),
        (["--shutdown-timeout", "-1"], "not a number of seconds"),
        (["--default-chat-template-kwargs", "[]"], "not a JSON object"),
        (["--default-chat-template-kwargs", "[" * 9999], "not a JSON object"),
        (["--ssl-keyfile", "k"], "needs --ssl-certfile"),
        (["--ssl-ca-certs", "c"], "needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "needs --ssl-certfile"),
        (["--curve-dir", "d"], "are for --endpoint"),
        (["m", "--endpoint", "ipc:///e"], "leave m out"),
        (["--endpoint", "ipc:///e", "--prot", "1"], "unknown: --prot; did you mean --port?"),
        (["--endpoint", "ipc:///e", "--tp", "2"], "the engine runs already"),
        (["--endpoint", "ipc:///e", "--standby"], "for a launched engine"),
        (["--endpoint", "ipc:///e", "--max-restarts", "1"], "for a launched engine"),
        (["--max-restarts", "-1"], "not an integer >= 0"),
        (["--listen", "ipc:///e"], "--endpoint ENDPOINT"),
        (["--listen=ipc:///e"], "--endpoint ENDPOINT"),
        (["--check"], "nanocore-engine --check"),
        (["--parent-fd", "3"], "only launchers set it"),
        (["--http-workers", "2", "--stored-responses-bytes", "1"], "leave one of them out"),
        (["--tokenizer", "/no/such"], "no such folder"),
        (["--otlp-traces-endpoint", "collector:4318"], "not a URL such as http://HOST:4318"),
        (["--otlp-traces-endpoint", "ftp://amy:p4ss@c"], "'ftp://***@c' is not a URL such as"),
        (["--otlp-traces-endpoint", "http://"], "not a URL such as http://HOST:4318"),
        (["--otlp-traces-endpoint", "http://c:99999/"], "not a URL such as http://HOST:4318"),
        (["--api-key", ""], "printable ASCII"),
        (["--api-key", "a b"], "printable ASCII"),
        (["--enable-access-log=1"], "takes no value"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(*arguments)
    assert text in str(caught.value)


def test_a_flag_that_is_nearly_ours_is_named_if_the_engine_refuses_it() -> None:
    assert (
        options("--prot", "1").engine.hint
        == "`nanocore serve` has --port, and --prot went to the engine"
    )
    assert options("--max-num-seqs", "1").engine.hint == ""
    assert "has --allowed-origins, and --cors-origins" in options("--cors-origins", "*").engine.hint
    assert options("-ctk", "q8_0").engine.hint == ""
    assert options("--load-format", "gguf").engine.hint == ""  # the engine's, near --log-format
    assert options("--config", "x.yaml").engine.hint == ""


def test_flags_of_other_engines_are_renamed_or_left_out_and_it_is_said() -> None:
    engine = options("--threads-http=2", "--jinja", "-c", "4096", "-ngl", "99").engine
    assert engine.flags == ("--max-model-len", "4096")
    assert engine.notices == (
        "--threads-http is --http-workers here",
        "--jinja is ignored: chat templates are always Jinja's",
        "-c is --max-model-len here",
        "-ngl 99 is ignored: all layers are on --device",
    )


def test_help_shows_the_main_flags_and_all_of_them_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {}
    for flag in ("--help", "--help=all"):
        with pytest.raises(SystemExit) as caught:
            options(flag)
        assert caught.value.code == 0
        shown[flag] = capsys.readouterr().out
    for text in shown.values():
        assert "--port PORT" in text
        assert "--max-model-len N" in text  # the engine's
    assert "--help=all" in shown["--help"]
    assert "--body-timeout" not in shown["--help"]
    assert "--body-timeout" in shown["--help=all"]
    assert "--max-num-queued-bytes" in shown["--help=all"]
    with pytest.raises(ConfigError, match="--help=most: nothing or all"):
        options("--help=most")


def test_defaults_follow_from_other_flags() -> None:
    assert options("--http-workers", "2").app.stored_responses_bytes == 0
    assert options("--stored-responses-bytes", "7").app.stored_responses_bytes == 7

    assert options("--endpoint", "ipc:///e").engine.start_timeout_s == JOIN_TIMEOUT_S
    assert options("--endpoint", "ipc:///e", "--start-timeout", "3").engine.start_timeout_s == 3

    given = options("--tool-call-parser", "none", "--reasoning-parser", "qwen3").app
    assert (given.tool_parser, given.reasoning_parser) == (None, "qwen3")

    assert options().server.ssl_cert_reqs == 0
    tls = ("--ssl-certfile", "f", "--ssl-ca-certs", "c")
    assert options(*tls).server.ssl_cert_reqs == 2
    assert options(*tls, "--ssl-cert-reqs", "1").server.ssl_cert_reqs == 1


def test_origins_are_as_browsers_send_them_and_hosts_without_brackets() -> None:
    origins = ["https://App.Example", "https://a.b/", "http://c:80", "https://[::1]:9", "*"]
    app = options("--allowed-origins", *origins, "--allowed-hosts", "B.c", "[::1]", "*").app
    assert list(app.allowed_origins) == [
        "https://app.example", "https://a.b", "http://c", "https://[::1]:9", "*"
    ]  # fmt: skip
    assert app.allowed_hosts == ("b.c", "::1", "*")
    assert options("--uds", "/tmp/x").app.allowed_hosts is None


def key_file(folder: Path, text: bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_keys_come_from_flags_a_file_and_the_environment(
    tmp_path: Path,
) -> None:
    path = key_file(tmp_path, b"# comment\n\nc\n  d \r\na\n")
    environment = {"NANOCORE_API_KEY": "e", "OTHER": "x"}
    given = options("--api-key", "a", "b", "--api-key", "c", "--api-key-file", str(path),
                    environment=environment)  # fmt: skip
    assert given.app.api_keys == ("a", "b", "c", "d", "e")
    assert environment == {"OTHER": "x"}, "no child is to inherit it"

    with pytest.raises(ConfigError, match="NANOCORE_API_KEY"):
        options(environment={"NANOCORE_API_KEY": ""})

    with pytest.raises(KeyFileError, match="No such file"):
        options("--api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        (b"a\n", 0o640, "chmod 600"),
        (b"a\n", 0o604, "chmod 600"),
        (b"\n# a\n", 0o600, "one key per line"),
        (b"\xff\xfe\n", 0o600, "not UTF-8"),
        (b"a b\n", 0o600, "printable ASCII"),
        (b"a\n" * 2**20, 0o600, "at most 1 MiB"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(
    tmp_path: Path, text: bytes, mode: int, problem: str
) -> None:
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=problem) as caught:
        options("--api-key-file", str(path))
    assert "keys" in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "mode", "is_good"),
    [(0, 0o440, True), (0, 0o640, True), (0, 0o660, False), (0, 0o444, False), (7, 0o440, False)],
)
def test_root_may_hand_a_key_to_a_service_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, is_good: bool
) -> None:
    path = key_file(tmp_path, b"a\n")
    info = os.stat_result((stat.S_IFREG | mode, *path.stat()[1:4], owner, *path.stat()[5:]))
    monkeypatch.setattr(os, "getuid", lambda: 7)
    monkeypatch.setattr(os, "fstat", lambda _: info)
    with nullcontext() if is_good else pytest.raises(KeyFileError, match="open to other users"):
        assert options("--api-key-file", str(path)).app.api_keys == ("a",)


def test_a_model_behind_the_flags_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match="MODEL comes first: nanocore serve some/model"):
        parse(["--port", "0", "some/model"], {})
    assert "MODEL comes first" in parse(["--max-num-seqs", "4", "some/model"], {}).engine.hint
    assert parse(["--tp", "2", "--port", "0"], {}).engine.flags == ("--tp", "2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tool-call-parser", "hermees"],
        ["--reasoning-parser", "qwen4"],
        ["--allowed-origins", "example.com"],
        ["--allowed-origins", "https://example.com/path"],
        ["--allowed-origins", "https://*.example.com"],
        ["--allowed-hosts", "example.com:8080"],
        ["--allowed-hosts", "cafe:8080"],
        ["--allowed-hosts", "http://example.com"],
        ["--allowed-hosts", "*.example.com"],
        ["--allowed-hosts", ""],
        ["--tokenizer", "/nowhere"],
        ["--tokenizer", "/"],
        ["--default-chat-template-kwargs", '{"messages": 1}'],
        ["--allowed-chat-template-kwargs", "tokenize"],
        ["--allowed-chat-template-kwargs", ""],
        ["--chat-template", "/nosuch.jinja"],
        ["--chat-template", "llama9"],
        ["--chat-template", "/"],
        ["--chat-template", "/dev/null"],
        ["--chat-template", "{% for %}"],
        ["--chat-template", "{{ raise_exception('no users') }}"],
        ["--ssl-cert-reqs", "2", "--ssl-certfile", "f"],
        ["--uds", ""],
        ["--served-model-name", ""],
        ["--http-workers", "10000"],
        ["--uds", "/tmp/x", "--port", "1"],
    ],
)
def test_what_would_fail_each_request_or_never_be_of_use_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        parse(arguments, {})


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://[::1]:1/otlp/v1/traces", "http://[::1]:1/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_has_the_usual_one(given: str, used: str) -> None:
    assert options("--otlp-traces-endpoint", given).app.otlp_traces_endpoint == used
    assert options().app.otlp_traces_endpoint is None


@pytest.mark.parametrize(
    ("flags", "expected_s"), [((), 60 + 2 * 84.0), (("--endpoint", "ipc:///x"), 60)]
)
def test_requests_wait_longer_for_an_engine_that_took_long_to_start(
    flags: tuple[str, ...], expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Mock(endpoint="ipc:///x", start=AsyncMock())
    monkeypatch.setattr(supervisor, "EngineSupervisor", lambda *_: engine)
    monkeypatch.setattr(supervisor, "time", Mock(monotonic=Mock(side_effect=[1000.0, 1084.0])))
    front = supervisor.Supervisor(options(*flags), [])

    async def waits_s() -> float | None:
        loop = asyncio.get_running_loop()
        front._signal, front._engine_end = loop.create_future(), loop.create_future()
        address = await front._start_engine()
        return address.resume_timeout_s

    assert asyncio.run(waits_s()) == expected_s
