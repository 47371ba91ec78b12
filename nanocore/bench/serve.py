"""`nanocore bench serve`: a load against an engine or a server that runs, and what came of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from nanocore.bench.arrivals import arrival_times
from nanocore.bench.datasets import check_file, load_requests
from nanocore.bench.engine_target import open_engine
from nanocore.bench.load import Run, run_load
from nanocore.bench.opened import Opened, until_ready
from nanocore.bench.outcome import BenchRequest
from nanocore.bench.packages import require
from nanocore.bench.result import result_path, serve_result, table, write_result
from nanocore.bench.serve_flags import parse
from nanocore.bench.serve_options import NANOCORE, ServeOptions
from nanocore.protocol.errors import ConfigError
from nanocore.system.standard_streams import complain, harmless

NOTHING_COMPLETED = 1
_MAX_ERRORS_SHOWN = 10


def run(arguments: list[str]) -> int:
    """Measure and report; the exit code, 1 if no request succeeded."""
    options = parse(arguments)
    _check_needs(options)
    measured, result = asyncio.run(_measure(options))
    report = options.report
    print(harmless(table(result)))
    for error in [each.error for each in measured.outcomes if each.error][:_MAX_ERRORS_SHOWN]:
        complain(f"a request failed: {error}")
    if report.save_result or report.append_result:
        write_result(report, result_path(options, result), result)
    if report.html is not None:
        from nanocore.bench.html_report import html_report  # imports matplotlib

        page = html_report({**result, "percentiles": report.percentiles}, measured.outcomes)
        try:
            Path(report.html).write_text(page, "utf-8")
        except OSError as error:
            raise ConfigError(f"--html {report.html}: {error.strerror}") from None
    return 0 if result["completed"] else NOTHING_COMPLETED


async def _measure(options: ServeOptions) -> tuple[Run, dict[str, object]]:
    async with _opened(options) as opened:
        # In a thread: the session with the engine lives meanwhile.
        requests = await asyncio.to_thread(load_requests, options.dataset, opened.source)
        if options.self_timed:
            times_s = [request.arrival_s or 0.0 for request in requests]
        else:
            times_s = arrival_times(len(requests), options.traffic, options.dataset.seed)
        await _prepare(options, opened, requests[0])
        gc.collect()
        gc.freeze()  # a collection would look at all requests, in the middle of a run
        try:
            began = datetime.now()
            run = await _run(options, opened, requests, times_s, "requests", "")
        finally:
            gc.unfreeze()
        tokenizer = opened.source.tokenizer
        if options.report.save_detailed and tokenizer is not None:
            for outcome in run.outcomes:
                if outcome.token_ids:
                    outcome.text = tokenizer.decode(outcome.token_ids)
        return run, serve_result(options, opened, run, times_s, began)


def _opened(options: ServeOptions) -> AbstractAsyncContextManager[Opened]:
    destination = options.destination
    if destination.backend == NANOCORE:
        return open_engine(destination, options.asked, options.ready_timeout_s)
    from nanocore.bench.http_target import open_server

    return open_server(destination, options.asked, options.ready_timeout_s)


async def _prepare(options: ServeOptions, opened: Opened, request: BenchRequest) -> None:
    """Wait until a request succeeds, if that was asked for, and warm up with so many more."""

    async def attempt() -> str:
        tried = await _run(options, opened, [request], [0.0], None, "ready-")
        return tried.outcomes[0].error

    if options.ready_timeout_s:
        await until_ready(attempt, options.ready_timeout_s)
    num = options.num_warmups
    if num:
        await _run(options, opened, [request] * num, [0.0] * num, "warm-up", "warm-up-")


async def _run(
    options: ServeOptions,
    opened: Opened,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    title: str | None,
    name: str,
) -> Run:
    """title: of the progress bar, if there is one. name: in the requests' ids."""
    hidden = title is None or not options.has_progress_bar
    with tqdm(total=len(requests), desc=title, unit="request", disable=hidden) as progress:
        return await run_load(
            opened.target,
            requests,
            times_s,
            max_concurrency=options.max_concurrency,
            request_id_prefix=f"{options.asked.request_id_prefix}{name}",
            on_end=progress.update,
        )


def _check_needs(options: ServeOptions) -> None:
    """Raises ConfigError for what would be missing later, after a long run maybe."""
    check_file(options.dataset)
    if options.destination.backend != NANOCORE:
        require("aiohttp", "asking a server")
    page = options.report.html
    if page is not None:
        require("matplotlib", "--html")
        if not Path(page).parent.is_dir():
            raise ConfigError(f"--html {page}: there is no such folder")
