"""The engine process from start to end: load, size the cache, serve, say goodbye.

Threads: main runs the step loop; `io` owns the socket; `kv-events` exists if events are published,
`parent-watch` if a client launched us. Each start-up phase logs one line with its seconds.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import torch

from nanocore import __version__
from nanocore.engine_core.admission import Admission
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.io_thread import IoThread
from nanocore.engine_core.kv_event_publisher import KVEventPublisher
from nanocore.engine_core.mailbox import Farewell, Inbox, Outbox, Shutdown
from nanocore.engine_core.parent import ParentLink
from nanocore.engine_core.queue_limit import QueueLimit
from nanocore.engine_core.scheduler import Scheduler
from nanocore.engine_core.step_trace import StepTrace
from nanocore.kv_cache import KVCacheManager
from nanocore.protocol.endpoint import EndpointLock
from nanocore.protocol.errors import CacheMemoryError, ConfigError, StartError
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets import EngineSocket
from nanocore.worker.executor import Executor
from nanocore.worker.local_executor import LocalExecutor, select_device
from nanocore.worker.model_config import ModelConfig, load_model_config

logger = logging.getLogger(__name__)


def run_engine(config: EngineConfig, parent: ParentLink | None) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        StartError: what kept the engine from serving.
    """
    started_s = time.monotonic()
    with ExitStack() as stack:
        # All addresses first: one in use is told before the model takes time and memory.
        stack.callback(EndpointLock(config.endpoint).release)
        publisher = _kv_event_publisher(config)
        if publisher is not None:
            stack.enter_context(closing(publisher))
        folder, model_config = _resolve_model(config)
        max_model_len = _max_model_len(config, model_config)
        executor = LocalExecutor(
            folder, model_config, max_model_len, config.device, config.dtype,
            config.attention_backend,
        )  # fmt: skip
        logger.info(
            "nanocore %s | device %s | model %s (%s) | dtype %s | kernels %s | endpoint %s",
            __version__, executor.device, folder, model_config.architecture, executor.dtype_name,
            executor.kernels.name, config.endpoint,
        )  # fmt: skip
        with _phase("load") as notes:
            notes.append(f"{executor.load_model() / 1e6:.1f} MB of weights")
        with _phase("kv cache") as notes:
            num_blocks = _num_kv_blocks(config, executor, max_model_len)
            executor.allocate_kv_cache(num_blocks, config.block_size, config.max_num_seqs)
            num_bytes = num_blocks * executor.kv_block_bytes(config.block_size)
            notes.append(
                f"{num_blocks} blocks of {config.block_size} tokens, {num_bytes / 1e6:.0f} MB"
            )
        card = ModelCard(
            model=str(folder),
            architecture=model_config.architecture,
            dtype=executor.dtype_name,
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=list(model_config.eos_token_ids),
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        return serve(config, card, executor, started_s, publisher, parent)


def serve(
    config: EngineConfig,
    card: ModelCard,
    executor: Executor,
    started_s: float,
    publisher: KVEventPublisher | None = None,
    parent: ParentLink | None = None,
) -> int:
    """Run the step loop and the io thread until told to stop; returns the exit code.

    Args:
        config: the endpoint must be locked. card: what clients are told. executor: ready to run.
        started_s: monotonic time of the process's start, for the log. publisher: of KV events.
        parent: the launching client.
    """
    inbox: Inbox = SimpleQueue()
    outbox = Outbox()
    kv_cache = KVCacheManager(card.num_blocks, card.block_size, config.enable_prefix_caching)
    if publisher is not None:
        kv_cache.subscribe(publisher.publish)
        publisher.start()
    scheduler = Scheduler(config.scheduler_config(card.max_model_len), kv_cache)
    trace = StepTrace(Path(config.step_trace)) if config.step_trace else None
    core = EngineCore(scheduler, executor, inbox, outbox, trace)
    queue_limit = QueueLimit(
        config.max_num_queued_reqs, config.max_num_queued_tokens, scheduler.counters
    )
    io_thread = IoThread(
        EngineSocket(config.endpoint),
        inbox,
        outbox,
        model=card,
        instance=secrets.token_hex(16),
        max_num_seqs=config.max_num_seqs,
        queue_limit=queue_limit,
        admission=Admission(card, config, queue_limit),
        num_steps=lambda: scheduler.counters.num_steps,
    )
    interrupted = _handle_signals(inbox)
    if parent is not None:
        parent.on_orphaned(lambda: inbox.put(Shutdown("the launching client is gone")))
    gc.collect()
    gc.freeze()  # what start-up made lives on: keep the collector from walking it
    io_thread.start()
    logger.info("ready in %.1f s", time.monotonic() - started_s)
    if parent is not None:
        parent.report_ready()
    farewell = _run(core)
    outbox.put(farewell)
    io_thread.join()
    if trace:
        trace.close()
    logger.info("stopped: %s", farewell.reason)
    if farewell.failure:
        return StartError.exit_code
    return 130 if interrupted else 0


def _run(core: EngineCore) -> Farewell:
    """Run the step loop to its end; what clients are told of it."""
    try:
        shutdown = core.run()
    except Exception as error:
        logger.exception("the step loop failed")
        return Farewell(f"internal error: {type(error).__name__}: {error}", failure=True)
    return Farewell(shutdown.reason, shutdown.failure)


def _kv_event_publisher(config: EngineConfig) -> KVEventPublisher | None:
    """Bound and not started; None if nobody asked for events."""
    if config.kv_events_endpoint is None:
        return None
    return KVEventPublisher(
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        config.kv_events_topic,
        medium="GPU" if select_device(config.device).type == "cuda" else "CPU",
    )


def _handle_signals(inbox: Inbox) -> list[int]:
    """Let signals end the step loop, and a second SIGTERM or SIGINT the process.

    Returns the SIGINTs seen. SIGHUP says that the terminal or the launching client is gone.
    """
    seen: list[int] = []
    interrupts: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(130)
        seen.append(number)
        if number == signal.SIGINT:
            interrupts.append(number)
        inbox.put(Shutdown(signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, lambda *_: inbox.put(Shutdown("SIGHUP")))
    return interrupts


def _resolve_model(config: EngineConfig) -> tuple[Path, ModelConfig]:
    if config.model is not None:
        folder = Path(config.model)
    else:
        folder = Path(str(resources.files("nanocore") / "demo_model"))
        logger.info("no --model given: serving the bundled demo model")
    return folder, load_model_config(folder)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    asked = config.max_model_len
    if asked is not None and asked > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked}: the model was made for {model.max_model_len} positions "
            "(max_position_embeddings in config.json); lower it"
        )
    return asked or model.max_model_len


def _num_kv_blocks(config: EngineConfig, executor: LocalExecutor, max_model_len: int) -> int:
    """Blocks in the pool: as told, or what the memory holds and the limits can use."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = executor.kv_block_bytes(config.block_size)
    num_bytes = config.kv_cache_memory_bytes or executor.available_kv_bytes()
    num_blocks = num_bytes // block_bytes
    needed = -(-max_model_len // config.block_size)
    if num_blocks < needed:
        raise CacheMemoryError(
            f"the KV cache of one request of {max_model_len} tokens needs "
            f"{needed * block_bytes / 1e6:.1f} MB, and there are {num_bytes / 1e6:.1f} MB for it: "
            f"use --max-model-len {num_blocks * config.block_size}, or more memory with "
            f"--kv-cache-memory-bytes {needed * block_bytes}"
        )
    return min(num_blocks, needed * config.max_num_seqs)


@contextmanager
def _phase(name: str) -> Iterator[list[str]]:
    """Log a start-up phase with its seconds and what it notes."""
    notes: list[str] = []
    start_s = time.monotonic()
    try:
        yield notes
    except torch.OutOfMemoryError as error:
        raise CacheMemoryError(f"{name}: out of device memory: {error}") from None
    logger.info("%s %.2f s: %s", name, time.monotonic() - start_s, ", ".join(notes))
