"""Runs in Ray's environment: examples/ray_serve.py with two replicas, and what becomes of requests.

Prints a JSON object of what it saw, which `test_ray.py` looks at. Its TMPDIR is its own, so the
engines that listen below are the replicas'.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import serve

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import ray_serve

from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.metrics import Stats

PORT = 8000
SETTINGS = {"num_replicas": 2, "max_replicas": 3, "max_num_seqs": 32}
PATIENCE_S = 90.0
NUM_STREAMS = 6
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 4}


def ask(text: str, **fields: Any) -> http.client.HTTPConnection:
    """Send a chat request; its answer is read from the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE_S)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def add(a: int) -> tuple[int, str]:
    """Status and text of an answer."""
    connection = ask(f"What is {a} + 1?")
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body["choices"][0]["message"]["content"] if answer.status == 200 else ""


def begin_stream() -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, bytes]:
    """A long one, of which the first chunk has come."""
    connection = ask("hi", **LONG)
    answer = connection.getresponse()
    line = answer.readline()
    while line.startswith(b":") or line == b"\n":  # a comment: nothing has come for a while
        line = answer.readline()
    return connection, answer, line


def endpoints() -> list[Path]:
    """Sockets of engines that are there."""
    return sorted(Path(tempfile.gettempdir()).glob("nanocore-launch-*/engine.sock"))


def engine_pid(endpoint: Path) -> int:
    """By the endpoint's lock."""
    return int(endpoint.with_suffix(".lock").read_text())


def process_stat(pid: int) -> list[str]:
    """State, parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_over(pid: int) -> bool:
    """Whether a process has ended; nobody in this namespace waits for orphans."""
    return not Path(f"/proc/{pid}").exists() or process_stat(pid)[0] == "Z"


async def stats() -> list[Stats]:
    """Of each engine."""
    found = []
    for endpoint in endpoints():
        async with AsyncEngineClient.connect(f"ipc://{endpoint}", resume=False) as client:
            found.append(await client.stats())
    return found


async def until(check: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it becomes so."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        try:
            if await check():
                return True
        except (NanocoreError, OSError, http.client.HTTPException, ValueError):
            pass  # an engine or a replica that is on its way
        await asyncio.sleep(0.2)
    return False


async def answers(pool: ThreadPoolExecutor, num: int = 12) -> list[tuple[int, str]]:
    """Sums, all at once."""
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(pool, add, 10 + i) for i in range(num)))


async def both_serve() -> bool:
    """Whether there are two engines, and each has had requests."""
    with ThreadPoolExecutor(12) as pool:
        all_good = all(status == 200 for status, _ in await answers(pool))
    found = await stats()
    return all_good and len(found) == 2 and all(one.prompt_tokens > 0 for one in found)


async def dropped_streams(pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Streams that run while engines are held, and are then left."""
    loop = asyncio.get_running_loop()
    before = sum(one.num_aborts for one in await stats())
    begun = await asyncio.gather(
        *(loop.run_in_executor(pool, begin_stream) for _ in range(NUM_STREAMS))
    )
    clients = [AsyncEngineClient.connect(f"ipc://{endpoint}") for endpoint in endpoints()]
    for client in clients:
        await client.__aenter__()
        await client.pause()
    open_then = sum(one.num_requests_running + one.num_requests_waiting for one in await stats())
    for connection, answer, _ in begun:
        answer.close()
        connection.close()

    async def is_idle() -> bool:
        return all(not s.num_requests_running + s.num_requests_waiting for s in await stats())

    was_idle = await until(is_idle)
    for client in clients:
        await client.close()
    return {
        "first_lines": [line.decode() for *_, line in begun],
        "open": open_then,
        "idle_while_paused": was_idle,
        "aborts": sum(one.num_aborts for one in await stats()) - before,
    }


async def some_dropped_streams(pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Of engines that were held before they were through, which a busy machine may not manage."""
    for _ in range(5):
        if (dropped := await dropped_streams(pool))["open"]:
            break
    return dropped


async def killed_engine(pool: ThreadPoolExecutor) -> dict[str, Any]:
    """The replica starts the next one, and requests wait for it."""
    endpoint = endpoints()[0]
    pid = engine_pid(endpoint)
    os.kill(pid, signal.SIGKILL)
    found = await answers(pool)

    async def is_back() -> bool:
        return engine_pid(endpoint) != pid and await both_serve()

    return {"answers": found, "came_back": await until(is_back)}


async def killed_replica() -> dict[str, Any]:
    """Ray starts the next one; its engine went with it."""
    endpoint = endpoints()[0]
    pid = engine_pid(endpoint)
    os.kill(int(process_stat(pid)[1]), signal.SIGKILL)

    async def is_back() -> bool:
        return is_over(pid) and endpoint not in endpoints() and await both_serve()

    return {"came_back": await until(is_back)}


async def drained(pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Streams on two replicas, of which one is to go."""
    loop = asyncio.get_running_loop()
    begun = await asyncio.gather(
        *(loop.run_in_executor(pool, begin_stream) for _ in range(NUM_STREAMS))
    )
    rests = [loop.run_in_executor(pool, answer.read) for _, answer, _ in begun]
    await loop.run_in_executor(
        pool,
        lambda: serve.run(ray_serve.build({"num_replicas": 1, "max_num_seqs": 32}), blocking=False),
    )
    ends = [(await rest).decode()[-14:].strip() for rest in rests]
    for connection, *_ in begun:
        connection.close()

    async def is_one() -> bool:
        return len(await stats()) == 1

    return {"ends": ends, "one_is_left": await until(is_one)}


async def watch() -> dict[str, Any]:
    """All of it, one after the other."""
    with ThreadPoolExecutor(24) as pool:
        return {
            "answers": await answers(pool),
            "both_served": await until(both_serve),
            "dropped": await some_dropped_streams(pool),
            "killed_engine": await killed_engine(pool),
            "killed_replica": await killed_replica(),
            "drained": await drained(pool),
        }


def main() -> None:
    """See the module."""
    ray.init(include_dashboard=False, object_store_memory=80 * 2**20, num_cpus=2)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    try:
        serve.run(ray_serve.build(SETTINGS))
        seen = asyncio.run(watch())
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(seen | {"left": [str(path) for path in endpoints()]}))


if __name__ == "__main__":
    main()
