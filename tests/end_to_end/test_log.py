"""What a real engine logs of its work, and how."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Final

from nanocore.client import AsyncEngineClient
from nanocore.engine_core import cli
from nanocore.engine_core.io import io_thread
from tests.end_to_end import forked
from tests.end_to_end.engine_process import EXIT_TIMEOUT_S
from tests.end_to_end.test_compile_process import DEMO_MODEL

WORK: Final = re.compile(
    r"Avg prompt throughput: (?!0\.0)[\d.]+ tokens/s, "
    r"Avg generation throughput: (?!0\.0)[\d.]+ tokens/s, Running: [01] reqs, Waiting: [01] reqs, "
)


def run_without_patience(arguments: list[str]) -> None:
    """An engine that says every second what it does."""
    io_thread.INTERVAL_S = 0.0  # type: ignore[misc]
    cli.main(arguments)


def test_an_engine_says_what_it_does_while_it_works_and_counts_its_tokens(short_path: Path) -> None:
    endpoint, log = f"ipc://{short_path}/e/engine.sock", short_path / "log"
    flags = ("--model", str(DEMO_MODEL), "--listen", endpoint, "--log-format", "json")

    async def work() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            while not WORK.search(log.read_text()):
                await client.complete("1 2 3", forked.GREEDY)

    engine = forked.start(log, flags, run_without_patience)
    try:
        asyncio.run(work())
        engine.terminate()
        engine.join(EXIT_TIMEOUT_S)
    finally:
        engine.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["process"] for line in lines} == {"engine"}
    assert lines[-1]["message"] == f"stopped: {signal.SIGTERM.name}"


def test_why_an_engine_does_not_start_is_an_object_where_its_log_is() -> None:
    done = forked.run_to_exit("--log-format", "json", "--block-size", "3")
    (line,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2
    assert line["level"] == "error"
    assert line["message"].startswith("nanocore-engine: --block-size 3")
    plain = forked.run_to_exit("--log-format", "xml")
    assert plain.stderr.startswith("nanocore-engine: ")
    assert "--log-format" in plain.stderr
