"""An engine on TCP with CURVE, from outside: its clients, strangers, and what listens where."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import (
    AsyncEngineClient,
    EngineDeadError,
    InvalidRequestError,
    SamplingParams,
    collect,
)
from nanocore.client.tokenizer import ChatMessage
from nanocore.demo_model import demo_model_folder
from tests.end_to_end import engine_process
from tests.end_to_end.forked import Engine, engine, run_to_exit
from tests.end_to_end.rank_processes import rank_pids
from tests.port_scanner import PROBES, scan
from tests.protocol.keys import KeyFolders, free_port, make_key_folders

pytestmark = pytest.mark.campaign

DEMO_MODEL = demo_model_folder()
QUESTION: list[ChatMessage] = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWER = "2 + 3 = 5"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
NO_TEXT = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
PATIENCE_S = 60.0  # as for every engine that a test starts: there may be few cores
NUM_PROBES = 10 * len(PROBES)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFolders:
    return make_key_folders(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def running(keys: KeyFolders) -> Iterator[Engine]:
    """A demo engine that started with an empty allow-list."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with engine(DEMO_MODEL, "--curve-dir", str(keys.engine), endpoint=endpoint) as started:
        run(_served(started, keys))  # tests may look at its port and its log at once
        yield started


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE_S))


def connect(running: Engine, folder: Path, timeout_s: float = PATIENCE_S) -> AsyncEngineClient:
    return AsyncEngineClient.connect(running.endpoint, curve_dir=folder, timeout_s=timeout_s)


async def chat(client: AsyncEngineClient) -> str:
    (answer,) = await collect(client.chat(QUESTION, GREEDY))
    return answer.content


# -- clients --------------------------------------------------------------------------------------


def test_clients_with_keys_chat_over_tcp_at_once(running: Engine, keys: KeyFolders) -> None:
    async def main() -> None:
        async with (
            connect(running, keys.client("one")) as one,
            connect(running, keys.client("other")) as other,
        ):
            assert await asyncio.gather(chat(one), chat(other)) == [ANSWER, ANSWER]

    run(main())
    log = running.stderr.read_text()
    assert "client 'one' is authenticated" in log


@pytest.mark.parametrize("wrong", ["the engine's key", "the client's key"])
def test_a_client_with_a_wrong_key_is_told_to_check_it_and_has_said_nothing(
    running: Engine, keys: KeyFolders, tmp_path: Path, wrong: str
) -> None:
    stranger = make_key_folders(tmp_path).client("stranger")
    if wrong == "the client's key":
        shutil.copy(keys.engine / "engine.key", stranger)

    async def main() -> None:
        async with connect(running, keys.client("friend")) as friend:
            with pytest.raises(EngineDeadError, match="if one runs there, check the keys"):
                await connect(running, stranger, timeout_s=1).__aenter__()
            stats = await friend.stats()
            assert (stats.num_clients, stats.num_protocol_errors) == (1, 0)

    run(main())


def test_a_revoked_client_keeps_its_session_and_gets_no_other(
    running: Engine, keys: KeyFolders
) -> None:
    async def main() -> None:
        async with connect(running, keys.client("leaver")) as leaver:
            keys.revoke("leaver")
            with pytest.raises(EngineDeadError, match="check the keys"):
                await connect(running, keys.client("leaver"), timeout_s=1).__aenter__()
            assert await chat(leaver) == ANSWER

    run(main())


def test_only_administrators_pause_drain_and_go_before_others(keys: KeyFolders) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--curve-dir", str(keys.engine), "--scheduling-policy", "priority")

    async def main(running: Engine) -> None:
        async with (
            connect(running, keys.client("user")) as user,
            connect(running, keys.client("admin", is_admin=True)) as admin,
        ):
            for ask in (user.pause, user.drain, user.reset_prefix_cache):
                with pytest.raises(InvalidRequestError, match="has the role user"):
                    await ask()
            await user.resume()
            with pytest.raises(InvalidRequestError, match="values below 0 are for administrators"):
                await user.complete([1, 2, 3], NO_TEXT, priority=-1)
            await user.complete([1, 2, 3], NO_TEXT, priority=1)
            await admin.complete([1, 2, 3], NO_TEXT, priority=-1)
            await admin.pause()
            assert (await user.stats()).paused
            await admin.resume()
            assert await admin.reset_prefix_cache()
            assert await chat(user) == ANSWER
            await admin.drain()

    with engine(DEMO_MODEL, *flags, endpoint=endpoint) as running:
        run(main(running))
        assert running.wait() == 0


def test_no_secret_is_in_the_log(running: Engine, keys: KeyFolders) -> None:
    log = running.stderr.read_bytes()
    assert b"ready in" in log
    assert keys.engine_keys.secret_key not in log


# -- strangers ------------------------------------------------------------------------------------


def test_a_port_scan_delivers_nothing_leaves_nothing_and_disturbs_nobody(
    running: Engine, keys: KeyFolders
) -> None:
    descriptors = Path(f"/proc/{running.pid}/fd")
    port = int(running.endpoint.rsplit(":", 1)[1])

    async def main() -> None:
        async with connect(running, keys.client("bystander")) as bystander:
            quiet = (await bystander.complete([1, 2, 3], NO_TEXT)).outputs[0].token_ids
            num_open = len(os.listdir(descriptors))
            scanning = asyncio.create_task(asyncio.to_thread(scan, "127.0.0.1", port, NUM_PROBES))
            num_answers = 0
            while not scanning.done() or not num_answers:
                output = await bystander.complete([1, 2, 3], NO_TEXT)
                assert output.outputs[0].token_ids == quiet
                num_answers += 1
            result = await scanning
            assert (result.num_closed, result.num_refused) == (NUM_PROBES, 0), result
            deadline_s = time.monotonic() + PATIENCE_S
            while len(os.listdir(descriptors)) > num_open:
                assert time.monotonic() < deadline_s, "descriptors are left over"
                await bystander.health()
            stats = await bystander.stats()
            assert (stats.num_clients, stats.num_protocol_errors) == (1, 0)

    run(main())


# -- starting -------------------------------------------------------------------------------------


def test_a_second_engine_at_the_same_port_exits_with_5(running: Engine, keys: KeyFolders) -> None:
    """Even if it wants every interface, of which it is warned."""
    everywhere = running.endpoint.replace("127.0.0.1", "0.0.0.0")
    result = run_to_exit("--listen", everywhere, "--curve-dir", str(keys.engine))
    assert result.returncode == 5
    assert f"{everywhere} is reachable from every network of this machine" in result.stderr
    assert f"{everywhere} is in use" in result.stderr
    assert "kv cache" not in result.stderr, "it was noticed before the model was loaded"
    run(_served(running, keys))


async def _served(running: Engine, keys: KeyFolders) -> None:
    async with connect(running, keys.client("again")) as client:
        await client.health()


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_secret_that_others_can_read_keeps_an_engine_from_starting(
    tmp_path: Path, check: list[str]
) -> None:
    folders = make_key_folders(tmp_path)
    secret = folders.engine / "engine.key_secret"
    secret.chmod(0o644)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    result = run_to_exit("--listen", endpoint, "--curve-dir", str(folders.engine), *check)
    assert result.returncode == 2
    assert f"chmod 600 {secret}" in result.stderr
    assert "Traceback" not in result.stderr


# -- what listens ---------------------------------------------------------------------------------


def listeners(pids: list[int]) -> set[tuple[str, str]]:
    """(protocol, address) of every socket on which these processes listen: TCP, UDP and Unix."""
    if shutil.which("ss") is None:
        pytest.skip("ss (iproute2) is not installed")
    lines = subprocess.run(["ss", "-lntupxH"], capture_output=True, text=True, check=True)
    found = set()
    for line in lines.stdout.splitlines():
        protocol, _state, _received, _sent, address, *_ = line.split()
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & set(pids):
            found.add((protocol, address))
    return found


def test_an_engine_on_tcp_listens_at_exactly_the_address_it_was_given(
    running: Engine, keys: KeyFolders
) -> None:
    run(_served(running, keys))
    address = running.endpoint.removeprefix("tcp://")
    assert listeners([running.pid]) == {("tcp", address)}


def test_an_engine_with_ranks_listens_at_its_own_unix_socket_and_nowhere_else(
    tiny_model: Path,
) -> None:
    async def serve(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S) as client:
            await client.complete([1, 2, 3], NO_TEXT)  # whatever it may open, it has opened

    with engine_process.engine(tiny_model, "--tp", "2") as running:
        run(serve(running.endpoint))
        ranks = rank_pids(running.process.pid, 2)
        path = running.endpoint.removeprefix("ipc://")
        assert listeners([running.process.pid, *ranks]) == {("u_str", path)}
