"""The C++ client of clients/cpp, built from source, against a real engine and the vectors."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.protocol.metrics import Stats
from tests.clients.conftest import (
    MAX_TOKENS,
    NO_TYPE,
    ROOT,
    VECTORS,
    WANTED,
    Chat,
    assert_conforms,
    last_words,
    num_words,
    resumed,
    text_of,
)

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(func_only=True)]  # building has its own

SOURCE = ROOT / "clients" / "cpp"
HEADERS = ("zmq_addon.hpp", "msgpack.hpp", "nlohmann/json.hpp")
BUILD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 60.0


def missing_tools() -> list[str]:
    """What the build needs and this machine lacks."""
    tools = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if tools:
        return tools
    command = ["g++", "-std=c++17", "-x", "c++", "-E", "-"]
    return [
        name
        for name in HEADERS
        if subprocess.run(
            command,
            input=f"#if !__has_include(<{name}>)\n#error\n#endif\n".encode(),
            capture_output=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        ).returncode
    ]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built examples."""
    if missing := missing_tools():
        pytest.skip(f"the C++ client cannot be built here: {', '.join(missing)} missing")
    folder = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(folder)],
        ["cmake", "--build", str(folder), "-j2"],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(program: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    return subprocess.run(
        [str(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def ids(token_ids: list[int]) -> str:
    """Token ids as the examples take them."""
    return ",".join(map(str, token_ids))


def engine_stats(chat: Chat) -> Stats:
    """The engine's statistics, by the Python SDK."""

    async def ask() -> Stats:
        async with AsyncEngineClient.connect(chat.endpoint) as client:
            return await client.stats()

    return asyncio.run(ask())


def test_the_codec_agrees_with_every_vector(programs: Path) -> None:
    done = run(programs / "vectors", VECTORS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(", wrong 0")


def test_the_library_is_one_small_header() -> None:
    headers = list((SOURCE / "include").rglob("*.hpp"))
    assert [path.name for path in headers] == ["client.hpp"]
    assert 0 < num_words(headers) <= 2220


def test_a_wrong_vector_is_noticed(programs: Path, tmp_path: Path) -> None:
    vector = '{"name": "v", "sender": "client", "frames": ["21", "%s"], "message": {"nonce": 7}}\n'
    path = tmp_path / "vectors.jsonl"
    path.write_text(vector % "81a56e6f6e636508")
    done = run(programs / "vectors", path)
    assert done.returncode == 1
    assert "wrong: v" in done.stdout


@pytest.mark.timeout(600)
def test_a_stream_prints_the_tokens_that_the_python_sdk_got(programs: Path, chat: Chat) -> None:
    done = run(programs / "stream", chat.endpoint, ids(chat.prompt_token_ids), MAX_TOKENS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [*map(str, chat.answer_token_ids), "finish_reason: stop"]


@pytest.mark.parametrize("endpoint", ["nonsense://x", "tcp://127.0.0.1:9"])
def test_an_endpoint_that_cannot_be_used_is_an_error(programs: Path, endpoint: str) -> None:
    done = run(programs / "stream", endpoint, "1")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.timeout(600)
def test_it_conforms(programs: Path) -> None:
    assert_conforms(str(programs / "stream"))


@pytest.mark.timeout(600)
def test_the_death_of_an_engine_is_noticed_by_its_connection(programs: Path) -> None:
    """Not by its silence, which would take 10 s."""
    assert "closed" in last_words([str(programs / "stream")])


@pytest.mark.timeout(600)
def test_a_stream_outlives_its_engine(programs: Path) -> None:
    whole, disturbed = resumed([str(programs / "resume")])
    assert whole[-1] == "1 finish_reason: length"
    assert disturbed == whole


def test_several_requests_run_at_once_and_one_left_early_is_aborted_once(
    programs: Path, chat: Chat
) -> None:
    before = engine_stats(chat)
    num_requests = 8
    done = run(programs / "concurrent", chat.endpoint, ids(chat.prompt_token_ids), num_requests)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answer = " ".join(map(str, chat.answer_token_ids))
    assert lines[:num_requests] == [f"cpp-{i + 1}: {answer}" for i in range(num_requests)]
    after = engine_stats(chat)
    assert lines[num_requests] == f"num_aborts: {before.num_aborts + 1}"  # still in its session
    assert after.num_aborts == before.num_aborts + 1
    assert after.num_requests_running == after.num_requests_waiting == 0
    assert after.num_protocol_errors == before.num_protocol_errors


def test_samples_have_seeds_of_their_own_and_log_probabilities(
    programs: Path, told_chat: Chat
) -> None:
    prompt = told_chat.prompt_token_ids
    several, alone = [
        run(programs / "samples", told_chat.endpoint, ids(prompt), num_samples, seed)
        for num_samples, seed in ((4, 7), (2, 8))
    ]
    assert several.returncode == 0, several.stderr
    lines = [line.split(" |") for line in several.stdout.splitlines()]
    assert [text.split()[-2:] for text, _, _ in lines] == [["length", f"{7 + i}"] for i in range(3)]
    for text, entries, of_prompt in lines:
        token_ids = text.split()[:-2]
        told = [entry.split(",") for entry in entries.split()]
        assert [token_id for token_id, _, _ in told] == token_ids
        assert {num_candidates for _, _, num_candidates in told} == {"3"}
        first = [*map(str, prompt[1:])] if text == lines[0][0] else []
        assert of_prompt.split() == first
    assert alone.stdout.split(" |")[:2] == lines[1][:2]


def test_outputs_are_what_was_wanted_and_a_bad_schema_is_refused_alone(
    programs: Path, told_chat: Chat
) -> None:
    arguments = [
        word
        for kind, what, _ in WANTED
        for word in (kind, ",".join(what) if isinstance(what, list) else what)
    ]
    done = run(
        programs / "structured", told_chat.endpoint, ids(told_chat.prompt_token_ids), *arguments
    )
    assert done.returncode == 0, done.stderr
    for line, (_, _, texts) in zip(done.stdout.splitlines(), WANTED, strict=True):
        if not texts:
            assert line == f"invalid_request: {NO_TYPE}"
            continue
        *token_ids, reason = line.split()
        assert reason == "stop"
        assert text_of(map(int, token_ids)) in texts


def test_the_model_card_and_its_files_are_read(programs: Path, chat: Chat) -> None:
    async def card() -> list[str]:
        async with AsyncEngineClient.connect(chat.endpoint) as client:
            model = client.model_card
            lengths = [f"max_model_len: {model.max_model_len}"]
            return lengths + [f"{file.name}: {file.num_bytes}" for file in model.files]

    done = run(programs / "concurrent", chat.endpoint, ids(chat.prompt_token_ids), 1)
    expected = asyncio.run(card())
    assert len(expected) > 1
    assert done.stdout.splitlines()[-len(expected) :] == expected
