"""The `nanocore` command, as a shell has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanocore import __version__
from nanocore.cli import command
from nanocore.cli import main as main_module
from tests.cli.served import exit_code


def test_help_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    assert "\n  serve " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["help", "run"], ["run", "--help"]])
def test_help_of_a_command_has_its_own_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 0
    assert capsys.readouterr().out.startswith("usage: nanocore run MODEL [QUESTION] [flags]")


def test_v_is_the_version_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("-v") == 0
    assert capsys.readouterr().out == f"nanocore {__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["", *main_module._SUBCOMMANDS, *(f"bench {name}" for name in main_module._BENCHMARKS)],
)
def test_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command.split(), "--version") == 0
    assert capsys.readouterr().out == f"nanocore {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "which command?"),
        (["help", "sreve"], "did you mean serve?"),
        (["run", "Why is this?"], "nanocore run: 'Why is this?': MODEL comes first: nanocore run"),
        (["run", "m", "hi", "-q", "ho"], "nanocore run: two questions, 'hi' and --quick 'ho'"),
        (["sreve"], "did you mean serve?"),
        (["--port"], "unknown command '--port'"),
        (["serve", "--port", "x"], "nanocore serve: argument --port"),
        (["serve", "--host", "0.0.0.0"], "nanocore serve: --host 0.0.0.0: anybody"),
        (["serve", "--num-typo"], "nanocore serve: unknown: --num-typo"),
        (["serve", "--block-size", "3"], "nanocore serve: --block-size 3: must be"),
        (["serve", "--prot", "1"], "; `nanocore serve` has --port, and --prot went to the engine"),
        (["batch", "in", "out", "--num-typo"], "nanocore batch: unknown: --num-typo"),
        (["chat", "-q", "hi", "--num-typo"], "nanocore chat: unknown: --num-typo"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    written = capsys.readouterr()
    assert text in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""


@pytest.mark.parametrize("name", [name for name in main_module._SUBCOMMANDS if name != "serve"])
def test_what_prints_wants_an_open_output(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        assert exit_code(name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name == "batch" or line == f"nanocore {name}: standard output is closed: open it"


@pytest.mark.parametrize(
    ("flags", "extras"),
    [((), "engine,server"), (("--endpoint", "ipc:///nowhere/engine.sock"), "server")],
)
def test_missing_packages_are_named_with_all_extras_that_the_command_needs(
    flags: tuple[str, ...],
    extras: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert exit_code("serve", *flags) == 2
    assert capsys.readouterr().err == (
        "nanocore serve: serving HTTP needs uvicorn: in the repository, "
        f"pip install '.[{extras}]'\n"
    )


def test_spans_need_packages_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> str | None:
        if name.startswith("opentelemetry."):  # as find_spec does, of a package that has no parent
            raise ModuleNotFoundError(name)
        return name

    monkeypatch.setattr(command, "find_spec", find_spec)
    assert exit_code("serve", "--otlp-traces-endpoint", "http://c:4318") == 2
    assert capsys.readouterr().err == (
        "nanocore serve: --otlp-traces-endpoint needs opentelemetry.sdk, "
        "opentelemetry.exporter.otlp.proto.http: in the repository, pip install '.[otel]'\n"
    )


def test_help_needs_neither_torch_nor_a_server() -> None:
    script = (
        "import sys\nfrom nanocore.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, *{'uvicorn', 'uvloop', 'zmq', 'torch', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0"
