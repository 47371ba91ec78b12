"""`nanocore bench serve`: sends a load to a running engine or server, and reports the result."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from importlib.util import find_spec
from typing import Final

from tqdm import tqdm

from nanocore.bench.datasets import check_file, load_requests
from nanocore.bench.load import BenchRequest, LoadRun, arrival_times, run_load
from nanocore.bench.result import draft_result, result_path, serve_result, table, write_result
from nanocore.bench.serve_flags import LoadOptions, parse
from nanocore.bench.targets import NANOCORE, OpenTarget, open_engine, until_ready
from nanocore.protocol.errors import ConfigError
from nanocore.system.standard_streams import complain, harmless

NOTHING_COMPLETED: Final = 1
_MAX_ERRORS_SHOWN: Final = 10


def run(arguments: list[str]) -> int:
    """Measure and report; return the exit code, 1 if no request succeeded."""
    options = parse(arguments)
    check_file(options.dataset)
    if options.destination.backend != NANOCORE and find_spec("aiohttp") is None:
        raise ConfigError("HTTP needs aiohttp: in the repository, pip install '.[bench]'")
    measured, result = asyncio.run(_measure(options))
    print(harmless(table(result)))
    for error in [each.error for each in measured.outcomes if each.error][:_MAX_ERRORS_SHOWN]:
        complain(f"a request failed: {error}")
    if options.save_result or options.append_result:
        write_result(options, result_path(options, result), result)
    return 0 if result["completed"] else NOTHING_COMPLETED


async def _measure(options: LoadOptions) -> tuple[LoadRun, dict[str, object]]:
    async with _opened(options) as opened:
        # In a thread, because the event loop must keep the session with the engine alive.
        requests = await asyncio.to_thread(load_requests, options.dataset, opened.source)
        if options.self_timed:
            times_s = [request.arrival_s or 0.0 for request in requests]
        else:
            times_s = arrival_times(len(requests), options.traffic, options.dataset.seed)
        await _prepare(options, opened, requests[0])
        gc.collect()
        gc.freeze()  # a garbage collection during the run would scan all requests
        try:
            now, before = datetime.now(), await opened.draft_counts()
            run = await _run(options, opened, requests, times_s, "requests", "")
        finally:
            gc.unfreeze()
        drafts = draft_result(before, await opened.draft_counts())
        tokenizer = opened.source.tokenizer
        if options.save_detailed and tokenizer is not None:
            for outcome in run.outcomes:
                if outcome.token_ids:
                    outcome.text = tokenizer.decode(outcome.token_ids)
        return run, serve_result(options, opened, run, now) | drafts


def _opened(options: LoadOptions) -> AbstractAsyncContextManager[OpenTarget]:
    if options.destination.backend == NANOCORE:
        return open_engine(options.destination, options.fields, options.ready_timeout_s)
    from nanocore.bench.http_target import open_server

    return open_server(options.destination, options.fields, options.ready_timeout_s)


async def _prepare(options: LoadOptions, opened: OpenTarget, request: BenchRequest) -> None:
    """Wait until a request succeeds, if requested, and send the warm-up requests."""

    async def attempt() -> str:
        tried = await _run(options, opened, [request], [0.0], None, "ready-")
        return tried.outcomes[0].error

    if options.ready_timeout_s:
        await until_ready(attempt, options.ready_timeout_s)
    num = options.num_warmups
    if num:
        await _run(options, opened, [request] * num, [0.0] * num, "warm-up", "warm-up-")


async def _run(
    options: LoadOptions,
    opened: OpenTarget,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    title: str | None,
    name: str,
) -> LoadRun:
    """title: of the progress bar; None for no bar. name: part of the request ids."""
    hidden = title is None or not options.has_progress_bar
    with tqdm(total=len(requests), desc=title, unit="request", disable=hidden) as progress:
        return await run_load(
            opened.send,
            requests,
            times_s,
            max_concurrency=options.max_concurrency,
            request_id_prefix=f"{options.fields.request_id_prefix}{name}",
            on_end=progress.update,
        )
