"""The Rust client (clients/rust) against a real engine, and against the test vectors.

Built once per session with cargo, offline, from the crates that Debian packages, into a temporary
folder. Skipped where either is missing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient
from tests.clients.conftest import (
    MAX_TOKENS,
    ROOT,
    VECTORS,
    Chat,
    assert_conforms,
    last_words,
    num_words,
    resumed,
    text_of,
)

CRATE = ROOT / "clients" / "rust"
CRATES = Path("/usr/share/cargo/registry")  # where Debian's librust-*-dev packages put sources
OFFLINE = f"""
net.offline = true
source.crates-io.replace-with = "debian"
source.debian.directory = "{CRATES}"
"""
NEEDED = ("zmq", "rmp-serde", "serde", "serde_derive", "serde_bytes", "serde_json", "thiserror")
BUILD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Crate:
    """A copy of the crate, and where cargo builds it."""

    folder: Path
    target: Path

    def cargo(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run cargo in the copy."""
        return subprocess.run(
            ["cargo", *args],
            cwd=self.folder,
            env=os.environ | {"CARGO_TARGET_DIR": str(self.target)} | env,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )

    def example(self, name: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a built example."""
        return subprocess.run(
            [self.target / "debug" / "examples" / name, *args],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    def live_test(self, name: str, chat: Chat) -> subprocess.CompletedProcess[str]:
        """Run one of the crate's own tests that need an engine."""
        flags = ("--test", "live", "--", "--ignored", "--exact", name)
        return self.cargo("test", *flags, NANOCORE_ENDPOINT=chat.endpoint)


@pytest.fixture(scope="session")
def crate(tmp_path_factory: pytest.TempPathFactory) -> Crate:
    """The crate with its examples and tests built."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    if missing := [name for name in NEEDED if not list(CRATES.glob(f"{name}-[0-9]*"))]:
        pytest.skip(f"Debian's Rust crates {', '.join(missing)} are not installed")
    folder = tmp_path_factory.mktemp("rust")
    # A copy, because cargo writes Cargo.lock beside Cargo.toml, and is told there to use CRATES.
    source = shutil.copytree(CRATE, folder / "crate", ignore=shutil.ignore_patterns("target"))
    (source / "Cargo.lock").unlink(missing_ok=True)
    (source / ".cargo").mkdir()
    (source / ".cargo" / "config.toml").write_text(OFFLINE)
    crate = Crate(source, folder / "target")
    built = crate.cargo("build", "--all-targets")
    assert built.returncode == 0, built.stderr
    return crate


pytestmark = [pytest.mark.campaign, pytest.mark.timeout(BUILD_TIMEOUT_S + 120)]


def joined(token_ids: list[int]) -> str:
    return ",".join(map(str, token_ids))


def num_aborts(endpoint: str) -> int:
    """As the engine counts them, through the Python SDK."""

    async def ask() -> int:
        async with AsyncEngineClient.connect(endpoint) as client:
            return (await client.stats()).num_aborts

    return asyncio.run(ask())


def test_it_streams_what_the_python_sdk_was_answered(crate: Crate, chat: Chat) -> None:
    run = crate.example("stream", chat.endpoint, joined(chat.prompt_token_ids), str(MAX_TOKENS))
    assert run.returncode == 0, run.stderr
    *token_ids, last = run.stdout.splitlines()
    assert [int(token_id) for token_id in token_ids] == chat.answer_token_ids
    assert last == "finish_reason: stop"


@pytest.mark.parametrize(
    ("name", "fixture"),
    [
        ("several_requests_at_once_get_what_each_gets_alone", "chat"),
        ("files_are_as_long_as_the_model_card_says", "chat"),
        ("samples_have_seeds_of_their_own_and_log_probabilities", "told_chat"),
        ("structured_outputs_end_and_one_that_is_none_is_refused_alone", "told_chat"),
    ],
)
def test_the_crates_tests_with_an_engine_pass(
    crate: Crate, request: pytest.FixtureRequest, name: str, fixture: str
) -> None:
    run = crate.live_test(name, request.getfixturevalue(fixture))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


def test_the_example_streams_a_structured_output(crate: Crate, told_chat: Chat) -> None:
    wanted = '{"json": "{\\"enum\\": [\\"red\\", 5]}"}'
    run = crate.example("stream", told_chat.endpoint, "1,2,3", "64", wanted)
    assert run.returncode == 0, run.stderr
    *token_ids, last = run.stdout.splitlines()
    assert last == "finish_reason: stop"
    assert text_of(map(int, token_ids)) in ('"red"', "5")


def test_the_death_of_an_engine_is_noticed_by_its_connection(crate: Crate) -> None:
    """Not by its silence, which would take 10 s."""
    assert "closed" in last_words([str(crate.target / "debug" / "examples" / "stream")])


def test_a_stream_outlives_its_engine(crate: Crate) -> None:
    whole, disturbed = resumed([str(crate.target / "debug" / "examples" / "resume")])
    assert whole[-1] == "1 finish_reason: length"
    assert disturbed == whole


def test_leaving_early_aborts(crate: Crate, chat: Chat) -> None:
    before = num_aborts(chat.endpoint)
    run = crate.live_test("one_aborted_and_one_left_are_both_aborted", chat)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout
    assert num_aborts(chat.endpoint) == before + 2


def test_it_conforms(crate: Crate) -> None:
    assert_conforms(str(crate.target / "debug" / "examples" / "stream"))


def test_the_library_is_small() -> None:
    assert 0 < num_words((CRATE / "src").glob("*.rs")) <= 2300


def test_the_vectors_pass(crate: Crate) -> None:
    run = crate.example("vectors", str(VECTORS))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "    0 failed\n" in run.stdout


def test_the_crates_own_tests_pass(crate: Crate) -> None:
    run = crate.cargo("test")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("fmt", ("fmt", "--check")),
        ("clippy", ("clippy", "--all-targets", "--", "-D", "warnings")),
    ],
)
def test_style(crate: Crate, tool: str, args: tuple[str, ...]) -> None:
    if crate.cargo(tool, "--version").returncode != 0:
        pytest.skip(f"cargo {tool} is not installed")
    run = crate.cargo(*args)
    assert run.returncode == 0, run.stdout + run.stderr
