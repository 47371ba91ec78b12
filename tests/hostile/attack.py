"""What hostile clients can do to an engine, and to those who share it: one whole attack.

A real engine with the demo model and bystanders, each a process that streams greedy requests
through the SDK. First it is quiet; then attackers send messages of every kind in `messages`, others
connect and leave by the hundreds, and one never reads. Seeds name the messages.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

from tests.hostile import peers
from tests.hostile.engine import TIMEOUT_S, Engine

KV_CACHE_BYTES: Final = 64 * 2**20
_SPAWN: Final = multiprocessing.get_context("spawn")


class Group:
    """Processes that run one function each, and end with one result each."""

    def __init__(self) -> None:
        self._members: list[tuple[BaseProcess, Connection]] = []

    def start(self, body: Callable[..., None], *arguments: Any) -> None:
        """Start one process; its last argument is the pipe for its result."""
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=body, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self._members.append((process, ours))

    def join(self) -> list[dict[str, Any]]:
        """Their results.

        Raises:
            EOFError: one of them failed; its traceback is on stderr.
        """
        results = [pipe.recv() for _, pipe in self._members]
        for process, _ in self._members:
            process.join()
        return results


def run(
    folder: Path,
    *,
    num_messages: int,
    num_attackers: int,
    num_bystanders: int,
    num_connections: int,
    quiet_s: float,
    seed: int,
) -> dict[str, Any]:
    """One whole attack in this folder; returns what was sent, answered and left behind."""
    engine = Engine(folder, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    stats = engine.stats()
    num_descriptors = engine.num_descriptors()
    bystanders, stop = _start_bystanders(engine, num_bystanders)
    time.sleep(quiet_s)
    quiet_end_s = time.monotonic()
    sent, answers = _attack(engine, num_attackers, num_messages, num_connections, seed)
    stop.set()
    requests = [r for result in bystanders.join() for r in result["requests"]]
    leaked = engine.leaked_descriptors(num_descriptors)
    stats_after = engine.stats()
    alive = engine.alive
    return {
        "num_messages": sent.total(),
        "sent": sent,
        "answers": answers,
        "num_protocol_errors": stats_after["num_protocol_errors"],
        "engine_alive": alive,
        "engine_exit_code": engine.stop(),
        "engine_log_lines": len(engine.log()),
        "failures": engine.failures()[:20],
        "descriptors_leaked": leaked,
        "free_blocks_before": stats["num_free_blocks"],
        "free_blocks_after": stats_after["num_free_blocks"],
        "requests_left": stats_after["num_requests_running"] + stats_after["num_requests_waiting"],
        "num_bystander_requests": len(requests),
        "mismatches": _mismatches(requests, quiet_end_s),
    }


def _start_bystanders(engine: Engine, num_clients: int) -> tuple[Group, Event]:
    """(their processes, what stops them), once each has had an answer to each prompt."""
    stop, ready = _SPAWN.Event(), _SPAWN.Semaphore(0)
    bystanders = Group()
    for client in range(num_clients):
        bystanders.start(peers.stand_by, engine.endpoint, client, ready, stop)
    for _ in range(num_clients):
        assert ready.acquire(timeout=TIMEOUT_S), "a bystander does not start"
    return bystanders, stop


def _attack(
    engine: Engine, num_attackers: int, num_messages: int, num_connections: int, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """(messages sent by kind, answers by code or op)."""
    until_end, stop = Group(), _SPAWN.Event()
    until_end.start(peers.never_read, engine.endpoint, seed, stop)
    attackers = Group()
    for number in range(num_attackers):
        share = num_messages // num_attackers
        attackers.start(peers.attack, engine.endpoint, seed + number, share)
    attackers.start(peers.churn, engine.endpoint, seed, num_connections)
    results = attackers.join()
    stop.set()
    results += until_end.join()
    sent: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for result in results:
        sent.update(result["sent"])
        answers.update(result["answers"])
    return sent, answers


def _mismatches(requests: list[dict[str, Any]], quiet_end_s: float) -> list[dict[str, Any]]:
    """Requests whose tokens are not those that the same prompt had while it was quiet."""
    expected = {r["prompt"]: r["token_ids"] for r in requests if r["end_s"] <= quiet_end_s}
    return [r for r in requests if r["token_ids"] != expected.get(r["prompt"])]
