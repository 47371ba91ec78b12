"""Commands without an address, beside one running server; and with its URL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanocore.cli.batch.command import parse as batch
from nanocore.cli.batch.flags import BatchOptions
from nanocore.cli.chat.command import parse as chat
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.server_settings import AppSettings
from nanocore.system.cache_folder import CacheFolder, FileCache
from nanocore.system.running import Running, registered
from tests.cli.served import DEMO, Served, exit_code, serving

QUESTION = "What is 123 + 456?"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def served(trace: Path) -> Iterator[Served]:
    """The only one of this user: a server whose engine is private to it."""
    with serving(
        str(DEMO), "--served-model-name", "org/demo", "toy", "--step-trace", str(trace),
        "--api-key", "secret-key",
    ) as started:  # fmt: skip
        started.line("ready: ")
        yield started


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    return f"http://{served.host}:{served.port}"


@pytest.fixture(autouse=True)
def _a_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield


@pytest.mark.parametrize("flags", [[], ["--url", "URL"], ["--url", "URL/v1"]])
def test_metrics_and_top_observe_it(
    flags: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag.replace("URL", url) for flag in flags]
    assert exit_code("metrics", *flags) == 0
    assert "nanocore:engine_draining{" in capsys.readouterr().out
    assert exit_code("top", "--once", "--json", "--interval", "0.01", *flags) == 0
    load = json.loads(capsys.readouterr().out)
    assert load["num_blocks"] > 0
    assert load["num_clients"] >= 1


@pytest.mark.parametrize(
    ("arguments", "is_joined"),
    [
        (["chat", "-q", QUESTION], True),
        (["run", "org/demo", *QUESTION.split()], True),
        (["chat", "-q", QUESTION, "--url", "URL"], False),
    ],
)
def test_a_chat_joins_it(
    arguments: list[str], is_joined: bool, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [argument.replace("URL", url) for argument in arguments]
    assert exit_code(*flags, "--set", "temperature=0") == 0
    written = capsys.readouterr()
    assert written.out == "123 + 456 = 579\n"
    assert (f"joining the server at {url} (org/demo, pid " in written.err) == is_joined


def test_ps_lists_it_with_its_engine(
    served: Served, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("ps") == 0
    heads, engine, server = capsys.readouterr().out.splitlines()
    assert heads.split() == ["KIND", "PID", "MODEL", "REQUESTS", "UP", "ADDRESS"]
    assert engine.startswith(f"engine of {served.pid}")
    assert server.split()[:3] == ["server", str(served.pid), "org/demo"]
    assert "0 running, 0 waiting" in server
    assert server.endswith(url)
    assert exit_code("ps", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in shown] == ["engine", "server"]
    assert "secret-key" not in json.dumps(shown)


def test_ps_lists_what_does_not_answer(
    served: Served, short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = ("tcp://127.0.0.1:9",)
    with registered(
        Running(
            kind="engine",
            pid=1,
            address=endpoints[0],
            model="org/a",
            endpoints=endpoints,
            curve_dir=str(short_path),
        )
    ):
        assert exit_code("ps") == 0
    shown = capsys.readouterr().out
    assert "no answer" in shown.splitlines()[-1]
    assert "0 running" in shown


@pytest.mark.parametrize("flags", [[], ["--url", "URL"], ["--backend", "nanocore"]])
def test_bench_serve_measures_it_with_its_tokenizer(
    flags: list[str], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "2"]
    result = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    flags = [flag.replace("URL", url) for flag in flags]
    assert exit_code("bench", "serve", "--disable-tqdm", *load, *result, *flags) == 0
    said = f"measuring the server at {url}"
    assert (said in capsys.readouterr().err) == ("--url" not in flags)
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found["total_input_tokens"]) == (2, 16)
    assert found["tokenizer_id"] == str(DEMO)


def test_its_tokenizer_is_that_of_the_model(served: Served) -> None:
    assert served.get("/tokenizer.json")[0] == 401
    status, content = served.get("/tokenizer.json", "secret-key")
    assert status == 200
    theirs = Tokenizer({"tokenizer.json": json.dumps(content).encode()}, "theirs")
    ours = Tokenizer.from_folder(DEMO)
    assert theirs.encode(QUESTION) == ours.encode(QUESTION)
    for tokenizer in (theirs, ours):
        tokenizer.close()


@pytest.mark.parametrize("flags", [[], ["--url", "URL"]])
def test_a_batch_is_answered_by_it(flags: list[str], url: str, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name in ("a", "b")
    ]
    lines[0]["body"] = body | {"model": "toy"}
    lines[1]["body"] = {"messages": []}
    given, results = tmp_path / "in", tmp_path / "out"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [flag.replace("URL", url) for flag in flags]
    assert exit_code("batch", str(given), str(results), *flags) == 1
    found = sorted(map(json.loads, results.read_text().splitlines()), key=lambda r: r["custom_id"])
    good, bad = (one["response"] for one in found)
    assert good["body"]["choices"][0]["message"]["content"] == "123 + 456 = 579"
    assert (good["request_id"] != "", bad["status_code"]) == (True, 400)
    assert "the conversation is empty" in found[1]["error"]["message"]


def test_a_trace_is_found_too(
    served: Served, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace.exists()
    assert exit_code("trace", "--json") == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(trace)
    assert exit_code("explain", "nobody") == 2
    assert f"{trace} has no request 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/metrics: [Errno 111]"),
        (["top", "--url", "URL/v1/models"], "/v1/models/metrics: HTTP 401"),
        (["metrics", "--url", "URL", "--endpoint", "ipc:///x"], "leave --endpoint and --curve-dir"),
        (["batch", "a", "b", "--url", "URL", "--model", "m"], "its own models: leave m out"),
        (["batch", "a", "b", "--url", "x"], "'x' is not a URL such as"),
    ],
)
def test_errors_are_a_line(
    arguments: list[str], said: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*(one.replace("URL", url) for one in arguments)) in (2, 70)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "is_joined"),
    [
        (["chat"], True),
        (["chat", "--tokenizer", str(DEMO)], True),
        (["chat", "org/a"], True),
        (["chat", "org/b"], False),
        (["chat", "org/a", "--max-num-seqs", "1"], False),
        (["chat", "--max-restarts", "1"], False),
        (["chat", "--url", "http://h"], False),
        (["batch", "in", "out"], True),
        (["batch", "in", "out", "--model", "org/a"], False),
    ],
)
def test_what_is_found_is_joined_unless_a_flag_says_otherwise(
    arguments: list[str],
    is_joined: bool,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    endpoints = ("tcp://192.0.2.7:5555",)
    entry = Running(
        kind="engine", pid=1, address=endpoints[0], model="org/a", endpoints=endpoints,
        curve_dir="/keys", tokenizer=str(DEMO), chat_template="chatml",
        served_model_names=("a", "b"),
    )  # fmt: skip
    with registered(entry):
        command, *flags = arguments
        parsed = batch(flags) if command == "batch" else chat(flags, {})
    engine = parsed.engine
    assert (engine.found == entry) == is_joined
    options = parsed.app if isinstance(parsed, BatchOptions) else parsed
    assert options.chat_template == ("chatml" if is_joined else None)
    if isinstance(options, AppSettings):
        assert options.served_model_names == (("a", "b") if is_joined else ())
    joined = endpoints, "/keys", str(DEMO)
    found = engine.endpoints, engine.curve_dir, engine.tokenizer
    assert found == (joined if is_joined else ((), None, None))


def test_a_path_is_launched_even_if_an_engine_has_it(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been another folder's `model.gguf`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    (short_path / "model.gguf").touch()
    monkeypatch.chdir(short_path)
    with registered(
        Running(kind="engine", pid=1, address="ipc:///x", model="model.gguf", endpoints=("x",))
    ):
        assert chat(["model.gguf"], {}).engine.endpoints == ()


@pytest.mark.parametrize("command", ["top", "metrics"])
def test_without_any_the_error_says_how_to_start_one(
    command: str,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert exit_code(command) == 70
    assert "is running: start one with `nanocore serve MODEL`" in capsys.readouterr().err
    assert exit_code("ps") == 0
    written = capsys.readouterr()
    assert written.out.splitlines() == ["KIND  PID  MODEL  REQUESTS  UP  ADDRESS"]
    assert written.err.startswith("nothing of yours runs: ")


def test_the_cache_folder_is_listed_and_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert exit_code("cache", "ls") == 0
    assert capsys.readouterr().err == f"nothing is cached in {tmp_path}/nanocore\n"
    FileCache().write("0" * 64, bytes(1_500_000))
    CacheFolder("converted", "").write("1" * 64, b"{}")
    assert exit_code("cache", "ls") == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["KIND", "NAME", "SIZE", "LAST", "USED"]
    assert sorted(row.split()[:3] for row in rows) == [
        ["converted", "1" * 12, "0.0"], ["files", "0" * 12, "1.5"]
    ]  # fmt: skip
    assert total == f"1.5 MB of at most 2,000 MB, in {tmp_path}/nanocore"
    assert exit_code("cache", "ls", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["kind"]: one["num_bytes"] for one in shown} == {"files": 1_500_000, "converted": 2}
    assert exit_code("cache", "clear", "--json") == 2
    assert exit_code("cache", "clear") == 0
    assert "deleted 2 files, 1.5 MB" in capsys.readouterr().out
    assert FileCache().read("0" * 64, 10**7) is None


def test_an_empty_cache_is_said_beside_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanocore.worker.loading.hub.cached_models", lambda: [])
    assert exit_code("list") == 0
    written = capsys.readouterr()
    assert written.out.splitlines() == ["MODEL  SIZE  LAST USED"]
    assert written.err.startswith("no models in the hub's cache (/")
