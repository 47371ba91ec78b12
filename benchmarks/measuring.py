"""What measuring costs: CPU time of `nanocore bench serve` itself for each arrival of tokens.

    python benchmarks/measuring.py [--streams 64] [--tokens 200] [--pace-ms 20]

An engine without a model answers all streams at a pace, over its own wire and through `nanocore
serve`. `wire` and `http` are the two targets of the benchmark; `httpx2` reads the same events by
that client library in place of aiohttp, and does no more. Sides take turns over the repetitions,
each with a short run before that does not count. Where this many microseconds times the arrivals of
a second reach one second, figures would be of the measuring. Writes
benchmarks/results/measuring.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from http_sides import start_ours
from no_model import write_pace
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.bench.http_target import open_server
from nanocore.bench.load import BenchRequest, run_load
from nanocore.bench.sse import DONE, EventReader, chunk_of
from nanocore.bench.targets import PATHS, Destination, OpenTarget, RequestFields, open_engine

RESULTS: Final = Path(__file__).parent / "results" / "measuring.json"
_PATH: Final = PATHS["openai"]
_TIMEOUT_S: Final = 30.0
Measure = Callable[[int, int], Coroutine[Any, Any, int]]
"""So many streams of so many tokens: how often tokens came."""


@asynccontextmanager
async def targeted(opening: AbstractAsyncContextManager[OpenTarget]) -> AsyncIterator[Measure]:
    """By a target of the benchmark."""
    async with opening as opened:

        async def measure(num_streams: int, num_tokens: int) -> int:
            requests = [
                BenchRequest(array("i", [i + 1, 2, 3]), 3, num_tokens) for i in range(num_streams)
            ]
            run = await run_load(opened.target, requests, [0.0] * num_streams)
            for outcome in run.outcomes:
                if outcome.error or outcome.num_output_tokens != num_tokens:
                    raise RuntimeError(outcome.error or f"{outcome.num_output_tokens} tokens")
            return sum(len(outcome.chunk_times_s) for outcome in run.outcomes)

        yield measure


@asynccontextmanager
async def by_httpx2(url: str) -> AsyncIterator[Measure]:
    """By another client library."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(limits=limits, timeout=_TIMEOUT_S, trust_env=False) as client:

        async def one(index: int, num_tokens: int) -> int:
            body = {"model": "demo", "prompt": [index + 1, 2, 3], "max_tokens": num_tokens,
                    "ignore_eos": True, "stream": True}  # fmt: skip
            reader, num_chunks = EventReader(), 0
            async with client.stream("POST", url, json=body) as response:
                async for data in response.aiter_raw():
                    for event in reader.feed(data):
                        if event != DONE:
                            num_chunks += any(c.has_tokens for c in chunk_of(event).choices)
            if not num_chunks:
                raise RuntimeError("no token came")
            return num_chunks

        async def measure(num_streams: int, num_tokens: int) -> int:
            return sum(await asyncio.gather(*(one(i, num_tokens) for i in range(num_streams))))

        yield measure


async def cpu_us(
    opening: AbstractAsyncContextManager[Measure], num_streams: int, num_tokens: int
) -> float:
    """Of this process, for each arrival."""
    async with opening as measure:
        await measure(num_streams, max(1, num_tokens // 10))
        start_s = time.process_time()
        num_chunks = await measure(num_streams, num_tokens)
        return (time.process_time() - start_s) / num_chunks * 1e6


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of each side the spread of its microseconds."""
    write_pace(folder / "pace", arguments.pace_ms / 1e3)
    (folder / "tokens.json").write_text(json.dumps(list(range(40, 90))))
    asked = RequestFields(ignore_eos=True)
    values: dict[str, list[float]] = {}
    with start_ours(folder) as side:
        url = f"http://127.0.0.1:{side.port}"
        endpoint = f"ipc://{folder}/engine.sock"
        over_wire = Destination(backend="nanocore", engine_endpoint=endpoint)
        over_http = Destination(backend="openai", base_url=url, path=_PATH, model="demo")
        for _ in range(arguments.reps):
            for name, opening in (
                ("wire", targeted(open_engine(over_wire, asked, _TIMEOUT_S))),
                ("http", targeted(open_server(over_http, asked, _TIMEOUT_S))),
                ("httpx2", by_httpx2(f"{url}{_PATH}")),
            ):
                figure = asyncio.run(cpu_us(opening, arguments.streams, arguments.tokens))
                values.setdefault(name, []).append(figure)
    return {name: spread(own, 1) for name, own in values.items()}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=200)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    report = describe_run(("nanocore", "aiohttp", "httpx2"))
    report["load"] = {name: getattr(arguments, name) for name in ("streams", "tokens", "pace_ms")}
    with tempfile.TemporaryDirectory(prefix="nc-") as folder:
        report["cpu_us_per_arrival"] = compare(arguments, Path(folder))
    rows = [["", "µs of CPU for each arrival"]]
    rows += [[name, with_range(own, 1)] for name, own in report["cpu_us_per_arrival"].items()]
    print(table(rows))
    write_report(arguments.out, report)


if __name__ == "__main__":
    main()
