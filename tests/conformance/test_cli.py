"""nanocore-conformance as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanocore_conformance import __version__
from nanocore_conformance.cli import main
from nanocore_conformance.client_scenarios import CLIENT_SCENARIOS
from nanocore_conformance.engine_rules import ENGINE_RULES
from tests.conformance import stream_client
from tests.conformance.fake_engine import fake_engine
from tests.protocol.keys import free_port, make_key_folders

PROTOCOL = (Path(__file__).parents[2] / "PROTOCOL.md").read_text("utf-8")
CLIENT = [sys.executable, stream_client.__file__, "{endpoint}", "{prompt}", "{max_tokens}"]
CHECKS = [*ENGINE_RULES.all, *CLIENT_SCENARIOS.all]


@pytest.fixture
def endpoint(short_path: Path) -> str:
    return f"ipc://{short_path}/engine.sock"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of the program."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_says_what_it_means_and_where_that_is_written(check) -> None:  # type: ignore[no-untyped-def]
    titles = {line.lstrip("#").strip() for line in PROTOCOL.splitlines() if line.startswith("#")}
    assert check.section in titles
    assert check.meaning.endswith(".")
    assert [other.name for other in CHECKS].count(check.name) == 1


def test_an_engine_that_conforms(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    with fake_engine(endpoint):
        rules = ("--rule", "welcome-is-complete", "--rule", "ping-gets-its-nonce-back")
        code, out, _ = run(capsys, "--engine", endpoint, *rules)
    assert code == 0
    assert out.splitlines() == [
        "pass  welcome-is-complete",
        "pass  ping-gets-its-nonce-back",
        "2 passed, 0 failed, 0 skipped",
    ]


def test_an_engine_that_does_not(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    with fake_engine(endpoint, "wrong-nonce"):
        rule = ("--rule", "ping-gets-its-nonce-back")
        code, out, _ = run(capsys, "--engine", endpoint, *rule)
    assert code == 1
    head, expected, got, total = out.splitlines()
    assert head == "FAIL  ping-gets-its-nonce-back (PROTOCOL.md, PING)"
    assert expected == "      expected: PONG with nonce 7"
    assert got.startswith("      got:      Pong(nonce=8, ")
    assert total == "0 passed, 1 failed, 0 skipped"


def test_the_report_for_programs(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    with fake_engine(endpoint, "wrong-nonce"):
        rules = ("--rule", "ping-gets-its-nonce-back", "--rule", "stats-are-told")
        code, out, _ = run(capsys, "--engine", endpoint, "--json", *rules)
    report = json.loads(out)
    assert (code, report["peer"], report["conforms"]) == (1, "engine", False)
    found = [(result["name"], result["outcome"]) for result in report["results"]]
    assert found == [("ping-gets-its-nonce-back", "fail"), ("stats-are-told", "pass")]
    assert report["results"][0]["expected"] == "PONG with nonce 7"


def test_a_client_is_started_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    rule = ("--rule", "tokens-and-end-may-be-one-message")
    code, out, _ = run(capsys, "--client", *rule, "--", *CLIENT)
    assert (code, out.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    code, out, _ = run(capsys, "--client", *rule, "--", *CLIENT, "10", "events-first")
    assert (code, out.splitlines()[-1]) == (1, "0 passed, 1 failed, 0 skipped")


def test_a_client_is_played_to_where_it_was_told(
    capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    rule = ("--rule", "stop-ends-before-max-tokens", "--listen", endpoint)
    command = [word.replace("{endpoint}", endpoint) for word in CLIENT]
    code, _, error = run(capsys, "--client", *rule, "--", *command)
    assert (code, error.count("{endpoint}")) == (2, 2)
    code, _, _ = run(capsys, "--client", *rule, "--", *CLIENT)
    assert code == 0


def test_an_engine_on_tcp_is_checked_with_a_clients_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders, endpoint = make_key_folders(tmp_path), f"tcp://127.0.0.1:{free_port()}"
    rules = ("--rule", "stats-are-told", "--rule", "late-reader-gets-everything")
    folder = str(folders.client("conformance"))
    with fake_engine(endpoint, keys=folders.engine_keys):
        code, out, _ = run(capsys, "--engine", endpoint, "--curve-dir", folder, *rules)
        assert (code, out.splitlines()[-1]) == (0, "2 passed, 0 failed, 0 skipped")
        code, _, error = run(capsys, "--engine", endpoint)
    assert code == 2
    assert "curve_dir" in error


def test_all_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, checks in (
        (("--engine", "ipc:///none", "--list"), ENGINE_RULES.all),
        (("--client", "--list"), CLIENT_SCENARIOS.all),
    ):
        code, out, _ = run(capsys, *arguments)
        names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
        assert (code, names) == (0, [check.name for check in checks])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--engine", "ipc:///none", "--rule", "stats-are-tld"),
            "unknown rule; did you mean stats-are-told? --list lists all",
        ),
        (("--engine", "ipc:///none", "--rule", "zzz"), "unknown rule; --list lists all"),
        (("--engine", "what:ever", "--rule", "stats-are-told"), "what:ever"),
        (("--engine", "ipc:///none", "--listen", "ipc:///x"), "--engine needs neither"),
        (("--client",), "needs a command"),
        (("--client", "--curve-dir", "x", "--", "c", "{endpoint}"), "goes with --engine"),
        (("--client", "--", "client", "{prompt}"), "needs a command"),
        (("--client", "--", "/nowhere", "{endpoint}"), "/nowhere cannot be run: No such file"),
        (("--engine", "ipc:///none", "--patience-s", "0.1"), "no engine answers at ipc:///none"),
    ],
)
def test_what_cannot_work_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert words in error


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"nanocore-conformance {__version__}\n", "")


def test_it_is_a_module_and_its_help_shows_the_command_of_a_client() -> None:
    command = [sys.executable, "-m", "nanocore_conformance", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "node stream.js {endpoint} {prompt} {max_tokens}" in result.stdout
