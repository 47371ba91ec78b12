"""What hostile clients can do to an engine, and to those who share it.

    python benchmarks/hostile.py [--messages 1000000] [--rate 5000] [--seed 1]

A real engine with the demo model and four bystanders, each a process that streams greedy requests
through the SDK. First it is quiet; then attackers send messages of every kind in
hostile_messages.py, others connect and leave by the thousands, and one never reads; then a control
takes as much CPU as they did and sends nothing. Last comes a port scanner, at an engine on TCP with
CURVE. Writes benchmarks/results/hostile.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import hostile_peers as peers
from hostile_engine import TIMEOUT_S, Engine, Phase

from nanocore.keygen import create_client, create_engine

RESULTS: Final = Path(__file__).parent / "results" / "hostile.json"
KV_CACHE_BYTES: Final = 64 * 2**20  # soon all in use, so that memory grows by other causes alone
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

    def join(self, watch: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Their results; until they come, watch is called every ten seconds.

        Raises:
            EOFError: one of them failed; its traceback is on stderr.
        """
        results = []
        for _, pipe in self._members:
            while not pipe.poll(10.0):
                watch()
            results.append(pipe.recv())
        for process, _ in self._members:
            process.join()
        return results


def run(
    folder: Path,
    *,
    num_messages: int,
    messages_per_s: float,
    num_attackers: int,
    num_bystanders: int,
    num_connections: int,
    quiet_s: float,
    seed: int,
) -> dict[str, Any]:
    """One whole run in this folder; see the module's docstring. Returns its report."""
    engine = Engine(folder, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    stats = engine.stats()
    num_descriptors, memory = engine.num_descriptors(), engine.memory_mib()
    bystanders, stop = _start_bystanders(engine, num_bystanders)
    phases = {}
    with _phase(phases, "quiet", engine):
        time.sleep(quiet_s)
    with _phase(phases, "attack", engine) as attack:
        sent, answers, cpu_s, rss_mib = _attack(
            engine, num_attackers, num_messages, messages_per_s, num_connections, seed
        )
    memory_after = engine.memory_mib()
    with _phase(phases, "control", engine):
        _burn(num_attackers, cpu_s / attack.length_s, quiet_s)
    stop.set()
    requests = [r for result in bystanders.join() for r in result["requests"]]
    leaked = engine.leaked_descriptors(num_descriptors)
    stats_after = engine.stats()
    alive = engine.alive
    exit_code = engine.stop()
    failures = engine.failures()
    mismatches = _mismatches(requests, phases["quiet"])
    figures = {name: phase.figures(requests) for name, phase in phases.items()}
    return {
        "seed": seed,
        "num_messages": sent.total(),
        "messages_per_s": round(sent.total() / attack.length_s),
        "sent": dict(sent.most_common()),
        "answers": dict(answers.most_common()),
        "num_protocol_errors": stats_after["num_protocol_errors"],
        "engine_alive": alive,
        "engine_exit_code": exit_code,
        "engine_log_lines": len(engine.log()),
        "uncaught_exceptions": len(failures),
        "failures": failures[:20],
        "descriptors_before": num_descriptors,
        "descriptors_leaked": leaked,
        "free_blocks_before": stats["num_free_blocks"],
        "free_blocks_after": stats_after["num_free_blocks"],
        "requests_left": stats_after["num_requests_running"] + stats_after["num_requests_waiting"],
        "memory_mib_before": memory,
        "memory_mib_after_attack": memory_after,
        "rss_mib_during_attack": rss_mib,
        "attackers_cores": round(cpu_s / attack.length_s, 2),
        "bystanders": {
            "num_requests": len(requests),
            "num_mismatches": len(mismatches),
            "mismatches": mismatches[:5],
            **figures,
            "attack_to_quiet": _ratios(figures["attack"], figures["quiet"]),
            "attack_to_control": _ratios(figures["attack"], figures["control"]),
        },
    }


def run_scan(folder: Path, *, num_connections: int, quiet_s: float) -> dict[str, Any]:
    """A port scanner at an engine on TCP, with CURVE, beside a bystander. Returns the report."""
    keys, client_keys = folder / "keys", folder / "client"
    create_engine(keys)
    create_client(keys, "bystander", client_keys)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = Engine(
        folder, "--curve-dir", str(keys),
        endpoint=f"tcp://127.0.0.1:{port}", curve_dir=client_keys,
    )  # fmt: skip
    num_errors, num_descriptors = engine.stats()["num_protocol_errors"], engine.num_descriptors()
    bystanders, stop = _start_bystanders(engine, 1)
    phases: dict[str, Phase] = {}
    with _phase(phases, "quiet", engine):
        time.sleep(quiet_s)
    with _phase(phases, "scan", engine):
        scanner = Group()
        scanner.start(peers.scan_port, "127.0.0.1", port, num_connections)
        (result,) = scanner.join()
    stop.set()
    requests = [r for result in bystanders.join() for r in result["requests"]]
    leaked = engine.leaked_descriptors(num_descriptors)
    num_delivered = engine.stats()["num_protocol_errors"] - num_errors
    alive, exit_code = engine.alive, engine.stop()
    return {
        **result,
        "num_delivered": num_delivered,
        "engine_alive": alive,
        "engine_exit_code": exit_code,
        "uncaught_exceptions": len(engine.failures()),
        "failures": engine.failures()[:20],
        "descriptors_leaked": leaked,
        "num_mismatches": len(_mismatches(requests, phases["quiet"])),
        "bystander": {name: phase.figures(requests) for name, phase in phases.items()},
    }


def _start_bystanders(engine: Engine, num_clients: int) -> tuple[Group, Event]:
    """(their processes, what stops them), once each has had an answer to each prompt."""
    stop, ready = _SPAWN.Event(), _SPAWN.Semaphore(0)
    bystanders = Group()
    for client in range(num_clients):
        bystanders.start(peers.stand_by, engine.endpoint, engine.curve_dir, client, ready, stop)
    for _ in range(num_clients):
        assert ready.acquire(timeout=TIMEOUT_S), "a bystander does not start"
    return bystanders, stop


def _attack(
    engine: Engine,
    num_attackers: int,
    num_messages: int,
    messages_per_s: float,
    num_connections: int,
    seed: int,
) -> tuple[Counter[str], Counter[str], float, list[float]]:
    """(messages sent by kind, answers by code or op, CPU seconds of the attackers, the engine's
    resident MiB every ten seconds)."""
    rss_mib: list[float] = []
    until_end, stop = Group(), _SPAWN.Event()
    until_end.start(peers.never_read, engine.endpoint, seed, stop)
    attackers = Group()
    for number in range(num_attackers):
        attackers.start(
            peers.attack,
            engine.endpoint,
            seed + number,
            num_messages // num_attackers,
            messages_per_s / num_attackers,
        )
    attackers.start(peers.churn, engine.endpoint, seed, num_connections)
    results = attackers.join(lambda: rss_mib.append(engine.memory_mib()["rss"]))
    stop.set()
    results += until_end.join()
    sent: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for result in results:
        sent.update(result["sent"])
        answers.update(result["answers"])
    return sent, answers, sum(result["cpu_s"] for result in results), rss_mib


def _burn(num_processes: int, cores: float, seconds: float) -> None:
    """Take that many cores for a while."""
    stop = _SPAWN.Event()
    burners = Group()
    for _ in range(num_processes):
        burners.start(peers.burn, min(1.0, cores / num_processes), stop)
    time.sleep(seconds)
    stop.set()
    burners.join()


@contextmanager
def _phase(phases: dict[str, Phase], name: str, engine: Engine) -> Iterator[Phase]:
    phase = Phase(engine)
    yield phase
    phases[name] = phase.end()


def _mismatches(requests: list[dict[str, Any]], quiet: Phase) -> list[dict[str, Any]]:
    """Requests whose tokens are not those that the same prompt had while it was quiet."""
    expected = {r["prompt"]: r["token_ids"] for r in requests if r["times_s"][-1] <= quiet.end_s}
    return [
        {"id": r["id"], "finish_reason": r["finish_reason"], "token_ids": r["token_ids"],
         "expected": expected.get(r["prompt"])}
        for r in requests if r["token_ids"] != expected.get(r["prompt"])
    ]  # fmt: skip


def _ratios(figures: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    names = [name for name in figures if "_ms_p" in name and figures[name] and base[name]]
    return {name.replace("_ms", ""): round(figures[name] / base[name], 2) for name in names}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=1e9, help="messages per second, at most")
    parser.add_argument("--attackers", type=int, default=3)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--scanner-connections", type=int, default=2000)
    parser.add_argument("--quiet-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    from machine import (
        describe_run,
        nice_sessions,
        write_report,
    )  # torch, which the processes do not need

    with tempfile.TemporaryDirectory(prefix="nc-") as folder, nice_sessions():
        report = run(
            Path(folder),
            num_messages=arguments.messages,
            messages_per_s=arguments.rate,
            num_attackers=arguments.attackers,
            num_bystanders=4,
            num_connections=arguments.connections,
            quiet_s=arguments.quiet_s,
            seed=arguments.seed,
        )
    with tempfile.TemporaryDirectory(prefix="nc-") as folder, nice_sessions():
        report["port_scan"] = run_scan(
            Path(folder),
            num_connections=arguments.scanner_connections,
            quiet_s=arguments.quiet_s / 4,
        )
    write_report(arguments.out, {**describe_run(), **report})
    for name, value in report.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
