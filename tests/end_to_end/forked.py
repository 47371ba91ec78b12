"""Engines in processes forked from one that has imported what an engine imports.

They are processes of their own, with their own exit code and standard error, and they run what
`nanocore-engine` runs; only the two seconds of CPU that importing takes are spent once for all.
What a test shows of the process itself, its signals and its parent is shown with one started anew
(`engine_process.py`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.arguments import EngineArgument, engine_flags
from nanocore.engine_core.cli import main
from nanocore.protocol.messages import ModelCard
from tests.end_to_end.engine_process import EXIT_TIMEOUT_S

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["nanocore.engine_core.process.process", "nanocore.engine_core.process.check", "llguidance"]
)


def run_to_exit(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run an engine that is expected to exit by itself; stdout is not kept."""
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        stderr = Path(directory) / "log"
        process = start(stderr, flags)
        try:
            process.join(EXIT_TIMEOUT_S)
            assert process.exitcode is not None, "it still runs"
        finally:
            process.kill()
        return subprocess.CompletedProcess(flags, process.exitcode, "", stderr.read_text())


@dataclass
class Engine:
    """A running engine. stderr: the file its log goes to."""

    pid: int
    endpoint: str
    stderr: Path


@contextmanager
def engine(model: Path, *flags: str, endpoint: str | None = None) -> Iterator[Engine]:
    """Start an engine, by default at a private endpoint; clients can connect at once, and wait."""
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        endpoint = endpoint or f"ipc://{directory}/e/engine.sock"
        stderr = Path(directory) / "log"
        process = start(stderr, ("--model", str(model), "--listen", endpoint, *flags))
        try:
            assert process.pid is not None
            yield Engine(process.pid, endpoint, stderr)
        finally:
            process.terminate()
            process.join(EXIT_TIMEOUT_S)


def ask(
    model: Path, prompt: Callable[[ModelCard], list[int]], **engine_args: EngineArgument
) -> tuple[ModelCard, list[int]]:
    """An engine's model card, and the tokens that it answers one prompt with."""

    async def complete(endpoint: str) -> tuple[ModelCard, list[int]]:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            output = await client.complete(prompt(client.model_card), GREEDY)
            return client.model_card, list(output.outputs[0].token_ids)

    with engine(model, *engine_flags(engine_args)) as running:
        return asyncio.run(asyncio.wait_for(complete(running.endpoint), 60))


def start(
    stderr: Path, flags: tuple[str, ...], run: Callable[[list[str]], None] = main
) -> multiprocessing.process.BaseProcess:
    """Start a process that runs this with the flags; its log goes to the file or pipe `stderr`."""
    process = _FORKS.Process(target=_run, args=(stderr, flags, run, os.environ["XDG_RUNTIME_DIR"]))
    process.start()
    return process


def _run(
    stderr: Path, flags: tuple[str, ...], run: Callable[[list[str]], None], runtime: str
) -> None:
    os.environ["XDG_RUNTIME_DIR"] = runtime  # the test's of now, not that of the first fork
    fd = os.open(stderr, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 2)
    os.close(fd)
    run(list(flags))
