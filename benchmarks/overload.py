"""What an engine does with ten times the load that it can take, and with a neighbour's thousand.

    python benchmarks/overload.py [--model small] [--clients 3]

Repeated --reps times, on an engine for the first two and another for the last:

- capacity: as many requests at once as run and a few more, each followed by the next (closed loop),
  before the overload and after it;
- overload: `--clients` processes let requests arrive as Poisson processes, together --times (10)
  the capacity, and do not heed when they are told to try again; a polite client beside them has one
  request at a time. Refusals are timed from the call to the exception, in the client's process.
  Goodput is what finished, as a share of the capacity;
- fairness: a client queues --flood requests (1,000) and another one asks, one request at a time:
  time to first token alone, beside the flood, and behind it: in the same session, which is how
  every session waited when the queue was one line.

Prompts are random token ids. Writes benchmarks/results/overload.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from models import model_folder
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.client import AsyncEngineClient, EngineOverloadedError, SamplingParams

RESULTS: Final = Path(__file__).parent / "results" / "overload.json"
COLUMNS: Final = {
    "capacity_req_per_s": "capacity req/s",
    "offered_req_per_s": "offered req/s",
    "goodput_of_capacity": "goodput / capacity",
    "refusal_ms_p50": "refusal p50 ms",
    "refusal_ms_p99": "refusal p99 ms",
    "polite_ttft_ms_p50": "polite TTFT p50 ms",
}
FAIRNESS: Final = {
    "alone_ttft_ms": "alone",
    "beside_flood_ttft_ms": "beside the flood",
    "behind_flood_ttft_ms": "behind the flood",
}


@dataclass(frozen=True, slots=True)
class Load:
    """prompt_tokens, output_tokens: of a request. queued: requests that may wait.

    duration_s: of what is counted, after ramp_s. times: the offered load, in capacities.
    flood: requests of the greedy client. polite: requests of the other one beside it.
    """

    prompt_tokens: int = 64
    output_tokens: int = 32
    max_num_seqs: int = 32
    queued: int = 64
    ramp_s: float = 3.0
    duration_s: float = 20.0
    times: float = 10.0
    clients: int = 3
    flood: int = 1000
    polite: int = 20

    def params(self) -> SamplingParams:
        """Of every request."""
        return SamplingParams(
            temperature=0, max_tokens=self.output_tokens, ignore_eos=True, detokenize=False
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client saw while it was counted. waits_s: times that refusals named."""

    num_offered: int
    num_finished: int
    refusals_ms: list[float]
    ttfts_ms: list[float]
    waits_s: list[float]


class Client:
    """Sends requests, and notes what comes of those that are sent, or finish, while it counts."""

    def __init__(self, client: AsyncEngineClient, load: Load, seed: str) -> None:
        self._client = client
        self._params = load.params()
        self._rng = random.Random(seed)
        self._vocab_size = client.model_card.vocab_size
        self._num_prompt = load.prompt_tokens
        self.counts = False
        self.num_offered = self.num_finished = 0
        self.refusals_ms: list[float] = []
        self.ttfts_ms: list[float] = []
        self.waits_s: list[float] = []

    async def request(self) -> bool:
        """One request, to its end; whether it was accepted."""
        prompt = array("i", self._rng.choices(range(self._vocab_size), k=self._num_prompt))
        counts = self.counts
        self.num_offered += counts
        sent_s, is_first = time.perf_counter(), True
        try:
            async for _ in self._client.generate(prompt, self._params):
                if is_first and counts:
                    self.ttfts_ms.append((time.perf_counter() - sent_s) * 1e3)
                is_first = False
        except EngineOverloadedError as busy:
            if counts:
                self.refusals_ms.append((time.perf_counter() - sent_s) * 1e3)
                self.waits_s.append(busy.retry_after_s)
            return False
        self.num_finished += self.counts
        return True

    def seen(self) -> Seen:
        """All that was noted."""
        return Seen(
            self.num_offered, self.num_finished, self.refusals_ms, self.ttfts_ms, self.waits_s
        )


async def closed_loop(client: Client, num_at_once: int, load: Load) -> Seen:
    """So many requests at any time."""

    async def again() -> None:
        while True:
            if not await client.request():
                await asyncio.sleep(0.05)

    return await _counted(client, [again() for _ in range(num_at_once)], load)


async def open_loop(client: Client, rate: float, load: Load, rng: random.Random) -> Seen:
    """Requests that come at their own times, whatever became of those before."""
    running: set[asyncio.Task[bool]] = set()

    async def arrivals() -> None:
        due_s = time.perf_counter()
        while True:
            due_s += rng.expovariate(rate)
            await asyncio.sleep(due_s - time.perf_counter())
            task = asyncio.create_task(client.request())
            running.add(task)
            task.add_done_callback(running.discard)

    seen = await _counted(client, [arrivals()], load)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return seen


async def _counted(client: Client, loops: list[Coroutine[Any, Any, None]], load: Load) -> Seen:
    """Run these, for as long as the load lasts, and count in the middle."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    await asyncio.sleep(load.ramp_s)
    client.counts = True
    await asyncio.sleep(load.duration_s)
    client.counts = False
    seen = client.seen()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


def run_client(endpoint: str, load: Load, seed: str, start_s: float, rate: float | None) -> Seen:
    """A client process: of the open loop at this rate; without one, one request at a time."""

    async def main() -> Seen:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as connected:
            client = Client(connected, load, seed)
            await asyncio.sleep(start_s - time.monotonic())  # of the system: all begin at once
            if rate is None:
                return await closed_loop(client, 1, load)
            return await open_loop(client, rate, load, random.Random(seed))

    return asyncio.run(main())


def measure_capacity(endpoint: str, load: Load, seed: str) -> float:
    """Requests per second, with seats and some of the queue always taken."""

    async def main() -> Seen:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as connected:
            num_at_once = load.max_num_seqs + load.queued // 2
            return await closed_loop(Client(connected, load, seed), num_at_once, load)

    return asyncio.run(main()).num_finished / load.duration_s


def measure_overload(endpoint: str, load: Load, seed: str) -> dict[str, float]:
    """Figures of one run at so many times the capacity, which is measured before and after."""
    before = measure_capacity(endpoint, load, f"{seed} before")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(load.clients + 1, context) as pool:
        rate = before * load.times / load.clients
        start_s = time.monotonic() + 8.0  # after their imports
        floods = [
            pool.submit(run_client, endpoint, load, f"{seed} {i}", start_s, rate)
            for i in range(load.clients)
        ]
        polite = pool.submit(run_client, endpoint, load, f"{seed} polite", start_s, None)
        seen, beside = [each.result() for each in floods], polite.result()
    capacity = (before + measure_capacity(endpoint, load, f"{seed} after")) / 2
    refusals_ms = [ms for each in seen for ms in each.refusals_ms]
    finished = sum(each.num_finished for each in [*seen, beside]) / load.duration_s
    p50, p99, most = np.percentile(refusals_ms, [50, 99, 100]).tolist()
    return {
        "capacity_req_per_s": capacity,
        "offered_req_per_s": sum(each.num_offered for each in seen) / load.duration_s,
        "goodput_req_per_s": finished,
        "goodput_of_capacity": finished / capacity,
        "num_refused": len(refusals_ms),
        "refusal_ms_p50": p50,
        "refusal_ms_p99": p99,
        "refusal_ms_max": most,
        "retry_after_s_p50": float(np.median([s for each in seen for s in each.waits_s])),
        "polite_ttft_ms_p50": float(np.median(beside.ttfts_ms)),
        "polite_num_refused": len(beside.refusals_ms),
    }


def measure_fairness(endpoint: str, load: Load, seed: str) -> dict[str, float]:
    """Times to first token of a client alone, beside a flood, and behind it."""

    async def median_ttft_ms(connected: AsyncEngineClient, num_requests: int) -> float:
        client = Client(connected, load, f"{seed} {num_requests}")
        client.counts = True
        for _ in range(num_requests):
            assert await client.request()
        return float(np.median(client.ttfts_ms))

    async def main() -> dict[str, float]:
        async with (
            AsyncEngineClient.connect(endpoint, timeout_s=60) as greedy,
            AsyncEngineClient.connect(endpoint, timeout_s=60) as polite,
        ):
            alone_ms = await median_ttft_ms(polite, load.polite)
            flood = Client(greedy, load, seed)
            tasks = [asyncio.create_task(flood.request()) for _ in range(load.flood)]
            while (await polite.stats()).num_requests_waiting < load.flood - load.max_num_seqs:
                await asyncio.sleep(0.01)
            behind = asyncio.create_task(median_ttft_ms(greedy, 1))
            beside_ms = await median_ttft_ms(polite, load.polite)
            num_left = (await polite.stats()).num_requests_waiting
            behind_ms = await behind
            await asyncio.gather(*tasks)
            return {
                "alone_ttft_ms": alone_ms,
                "beside_flood_ttft_ms": beside_ms,
                "behind_flood_ttft_ms": behind_ms,
                "still_waiting_when_the_polite_one_was_done": num_left,
            }

    return asyncio.run(main())


def on_engine(model: Path, flags: dict[str, int], measure: Callable[[str], Any]) -> Any:
    """What is measured at the endpoint of an engine with these flags."""

    async def main() -> Any:
        async with AsyncEngineClient.launch(model=model, **flags) as client:
            return await asyncio.to_thread(measure, client.endpoint)

    return asyncio.run(main())


def measure_all(model: Path, load: Load, num_repetitions: int) -> dict[str, dict[str, Any]]:
    """The spread of every figure."""
    flags = {
        "max_num_seqs": load.max_num_seqs,
        "max_model_len": load.prompt_tokens + load.output_tokens,
    }
    limited = {**flags, "max_num_queued_reqs": load.queued}
    overloads, fairness = [], []
    for i in range(num_repetitions):

        def overload(endpoint: str, seed: str = f"{i}") -> dict[str, float]:
            return measure_overload(endpoint, load, seed)

        overloads.append(on_engine(model, limited, overload))
        print(overloads[-1], file=sys.stderr)

        def neighbours(endpoint: str, seed: str = f"{i}") -> dict[str, float]:
            return measure_fairness(endpoint, load, seed)

        fairness.append(on_engine(model, flags, neighbours))
        print(fairness[-1], file=sys.stderr)
    return {
        name: {figure: spread([run[figure] for run in runs]) for figure in runs[0]}
        for name, runs in (("overload", overloads), ("fairness", fairness))
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small")
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write."""
    arguments = parse_arguments()
    load = Load(**{name: getattr(arguments, name) for name in asdict(Load())})
    report = {**describe_run(), "model": Path(arguments.model).name, "load": asdict(load)}
    report |= measure_all(model_folder(arguments.model), load, arguments.reps)
    for name, columns in (("overload", COLUMNS), ("fairness", FAIRNESS)):
        figures = report[name]
        print(table([[name, *columns.values()], ["", *(with_range(figures[c]) for c in columns)]]))
    write_report(arguments.out, report)


if __name__ == "__main__":
    main()
