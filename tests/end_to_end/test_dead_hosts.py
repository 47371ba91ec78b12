"""A host that dies, or a network: the other end of a TCP connection notices it, and soon.

What is asserted is that it does notice, within a bound that no busy machine exceeds; how soon is
printed (`pytest -s`), and is 3 s where nothing else runs. Each end is a process of its own on a
host of its own (`network.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.campaign import in_campaign
from tests.end_to_end.engine_process import command
from tests.end_to_end.network import Host, two_hosts
from tests.protocol.keys import KeyFolders, make_key_folders

BOUND_S = 15.0
PATIENCE_S = 120.0

CLIENT = """
import asyncio, sys
from pathlib import Path
from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Ping, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.curve import ClientKeys

async def main(endpoint, keys, num, patience_ms):
    connection = await EngineConnection.open(endpoint, 120, ClientKeys.load(Path(keys)))
    socket = connection._socket
    if patience_ms:
        socket.post(encode(Ping(session_timeout_ms=patience_ms)))
    params = EngineSamplingParams(max_tokens=900, ignore_eos=True)
    for i in map(str, range(num)):
        prompt = b"\\1\\0\\0\\0"
        socket.post(encode(Submit(request_id=i, prompt_token_ids=prompt, sampling=params)))
    while (await connection.calls.control("stats")).stats.num_requests_running < min(num, 1):
        pass
    print("ready", flush=True)
    while connection.error is None:
        await asyncio.sleep(0.02)
    print("lost:", connection.error, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""

WATCHER = """
import asyncio, sys
from pathlib import Path
from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.protocol.sockets.curve import ClientKeys

async def main(endpoint, keys):
    connection = await EngineConnection.open(endpoint, 120, ClientKeys.load(Path(keys)))
    async def stats():
        return (await connection.calls.control("stats")).stats
    while (await stats()).num_clients < 2:
        pass
    print("ready", flush=True)
    while (seen := await stats()).num_clients > 1 or seen.num_requests_running:
        await asyncio.sleep(0.02)
    print("gone", "and aborted" if seen.num_aborts else "", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@dataclass
class Scene:
    """An engine on one host, and on the other one a client of it."""

    engine_host: Host
    client_host: Host
    engine: subprocess.Popen[bytes]
    endpoint: str
    keys: KeyFolders
    processes: ExitStack

    def start(self, host: Host, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Run a script on a host, until it says that it is ready."""
        line = host.command(sys.executable, "-c", script, self.endpoint, *arguments)
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        self.processes.callback(_end, process)
        return process

    def client(self, num_requests: int = 0, patience_ms: int = 0) -> subprocess.Popen[str]:
        folder = str(self.keys.client("client"))
        return self.start(self.client_host, CLIENT, folder, str(num_requests), str(patience_ms))

    def watcher(self) -> subprocess.Popen[str]:
        """Beside the engine: it sees when the client's session is closed."""
        return self.start(self.engine_host, WATCHER, str(self.keys.client("watcher")))


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def read_line(process: subprocess.Popen[str]) -> str:
    async def read() -> str:
        assert process.stdout is not None
        return await asyncio.to_thread(process.stdout.readline)

    return asyncio.run(asyncio.wait_for(read(), PATIENCE_S)).strip()


@pytest.fixture
def scene(tiny_model: Path, tmp_path: Path) -> Iterator[Scene]:
    with two_hosts() as (here, there), ExitStack() as processes:
        keys = make_key_folders(tmp_path)
        endpoint = f"tcp://{here.address}:5555"
        flags = ("--model", str(tiny_model), "--listen", endpoint, "--max-num-seqs", "1")
        line = here.command(*command(*flags, "--curve-dir", str(keys.engine)))
        with (tmp_path / "log").open("wb") as log:
            engine = subprocess.Popen(line, stderr=log)
        processes.callback(_end, engine)
        yield Scene(here, there, engine, endpoint, keys, processes)


def kill_connection(scene: Scene, client: subprocess.Popen[str], cause: str) -> None:
    here, there = scene.engine_host, scene.client_host
    match cause:
        case "the network is gone":
            here.lose_all_sent_to(there)
            there.lose_all_sent_to(here)
        case "the engine hears nothing":
            there.lose_all_sent_to(here)
        case "the client hears nothing":
            here.lose_all_sent_to(there)
        case "the engine is stopped":
            scene.engine.send_signal(signal.SIGSTOP)
        case "the client is stopped":
            client.send_signal(signal.SIGSTOP)
        case "the connection is reset":
            here.reset(there)
        case "the client is killed":
            client.kill()
        case "the engine is killed":
            scene.engine.kill()


NETWORK = ("the network is gone", "the engine hears nothing", "the client hears nothing")
BOTH = (*NETWORK[1:], "the connection is reset")
CLIENT_DEATHS = (*BOTH, "the client is killed")
ENGINE_DEATHS = (*BOTH, "the engine is stopped", "the engine is killed")


@pytest.mark.parametrize(
    ("cause", "num_requests"),
    [
        (NETWORK[0], 40),
        *in_campaign((NETWORK[0], 0), *itertools.product(CLIENT_DEATHS, [0, 40])),
    ],
)
def test_an_engine_notices_that_a_clients_host_is_gone(
    scene: Scene, cause: str, num_requests: int
) -> None:
    client, watcher = scene.client(num_requests), scene.watcher()
    assert read_line(client) == read_line(watcher) == "ready"
    began_s = time.monotonic()
    kill_connection(scene, client, cause)
    assert read_line(watcher) == ("gone and aborted" if num_requests else "gone")
    took_s = time.monotonic() - began_s
    print(f"{cause}, {num_requests} requests: the engine took {took_s:.2f} s")
    assert took_s < BOUND_S


@pytest.mark.campaign
def test_an_engine_notices_that_a_client_is_stopped_if_it_asked_for_that(scene: Scene) -> None:
    client, watcher = scene.client(40, patience_ms=3000), scene.watcher()
    assert read_line(client) == read_line(watcher) == "ready"
    began_s = time.monotonic()
    kill_connection(scene, client, "the client is stopped")
    assert read_line(watcher) == "gone and aborted"
    took_s = time.monotonic() - began_s
    print(f"the client is stopped: the engine took {took_s:.2f} s")
    assert took_s < BOUND_S


@pytest.mark.parametrize(
    ("cause", "num_requests"),
    [
        (NETWORK[0], 40),
        *in_campaign((NETWORK[0], 0), *itertools.product(ENGINE_DEATHS, [0, 40])),
    ],
)
def test_a_client_notices_that_an_engines_host_is_gone(
    scene: Scene, cause: str, num_requests: int
) -> None:
    client = scene.client(num_requests)
    assert read_line(client) == "ready"
    began_s = time.monotonic()
    kill_connection(scene, client, cause)
    lost = read_line(client)
    assert lost.startswith("lost: ")
    took_s = time.monotonic() - began_s
    print(f"{cause}, {num_requests} requests: the client took {took_s:.2f} s ({lost})")
    assert took_s < BOUND_S
