"""A standby: an engine that has loaded its weights, and serves once the current engine is gone.

It waits for its endpoint's lock, which the kernel takes from a process that dies. KV memory is
measured and allocated only then, when the other engine's is free again.
"""

from __future__ import annotations

import gc
import logging
import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from nanocore.engine_core.mailbox import SIGNAL_POLL_S
from nanocore.engine_core.process.parent import ParentLink
from nanocore.protocol.errors import StartReport, WorkerError
from nanocore.system.endpoint_lock import EndpointLock
from nanocore.worker.executors.executor import StepExecutor

logger = logging.getLogger(__name__)

_INTERRUPTED: Final = 130


def stand_by(
    endpoint: str, executor: StepExecutor, parent: ParentLink | None
) -> EndpointLock | int:
    """Wait until nobody serves at the endpoint; return its lock, or the exit code if told to end.

    executor: that has loaded its weights.

    Raises:
        StartError: a rank has died meanwhile, or the endpoint cannot be had.
    """
    news: SimpleQueue[EndpointLock | int | Exception] = SimpleQueue()

    def wait_for_lock() -> None:
        try:
            news.put(EndpointLock(endpoint, patient=True))
        except Exception as error:
            news.put(error)

    if parent is not None:
        parent.on_orphaned(lambda: news.put(0))
    executor.on_failure(lambda reason: news.put(WorkerError(reason)))
    codes = {signal.SIGTERM: 0, signal.SIGINT: _INTERRUPTED}

    def on_signal(number: int, _frame: object) -> None:
        news.put(codes[signal.Signals(number)])

    handlers = {number: signal.signal(number, on_signal) for number in codes}
    try:
        gc.collect()
        gc.freeze()
        Thread(target=wait_for_lock, name="standby", daemon=True).start()
        logger.info("standing by: loaded, and waiting for the engine at %s to end", endpoint)
        if parent is not None:
            parent.report(StartReport(standing_by=True))
        while True:
            with suppress(Empty):
                what = news.get(timeout=SIGNAL_POLL_S)
                break
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(what, Exception):
        raise what
    if isinstance(what, EndpointLock):
        logger.info("taking over from process %s", what.last_holder or "unknown")
    else:
        logger.info("stopped while standing by")
    return what
