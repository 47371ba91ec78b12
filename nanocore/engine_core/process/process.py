"""The engine process from start to end: load, size the cache, serve, say goodbye.

Threads: main runs the step loop; `io` owns the socket; `watchdog` notices a step that hangs;
`masks-*` and `grammars-*` serve structured outputs; `kv-events` exists if events are published,
`parent-watch` if a client launched us. A process beside them tries grammars. Each
start-up phase logs one line with its seconds.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Final

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.client_limit import ClientLimit, raise_descriptor_limit
from nanocore.engine_core.io.compiling_requests import CompilingRequests
from nanocore.engine_core.io.control_handler import ControlHandler
from nanocore.engine_core.io.front_desk import FrontDesk
from nanocore.engine_core.io.io_thread import IoThread
from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher
from nanocore.engine_core.io.model_files import ModelFiles
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.io.reception import Reception
from nanocore.engine_core.io.stats_log import StatsLog
from nanocore.engine_core.mailbox import BeginDrain, Farewell, Inbox, Outbox, Shutdown
from nanocore.engine_core.metrics.collector import MetricsCollector
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.engine_core.process.forecast import forecast, joined_cost
from nanocore.engine_core.process.forecast_table import summary
from nanocore.engine_core.process.machine import machine_speeds
from nanocore.engine_core.process.occupied import occupy
from nanocore.engine_core.process.parent import ParentLink
from nanocore.engine_core.process.standby import stand_by
from nanocore.engine_core.process.start_log import (
    describe_workers,
    log_beginning,
    log_generation_defaults,
    phase,
    process_age_s,
)
from nanocore.engine_core.process.vocabulary_load import VocabularyLoad
from nanocore.engine_core.process.watchdog import GRACE_S, Watchdog
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.stats import stats_of
from nanocore.engine_core.step_clock import DeadMansSwitch, StepClock
from nanocore.engine_core.step_trace import StepTrace
from nanocore.engine_core.structured.mask_filler import MaskFiller
from nanocore.engine_core.structured.matcher import GrammarSource
from nanocore.engine_core.structured.no_grammars import NoGrammars
from nanocore.engine_core.utilisation import Utilisation
from nanocore.kv_cache import KVCacheManager
from nanocore.protocol.errors import (
    CacheMemoryError,
    ConfigError,
    ModelFileError,
    StartError,
    is_out_of_memory,
    shorten,
)
from nanocore.protocol.messages import ModelCard, ModelFile
from nanocore.protocol.sockets import EngineSocket
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.device.device import select_device
from nanocore.worker.executors.executor import Executor, StepExecutor
from nanocore.worker.executors.process_executor import ProcessExecutor
from nanocore.worker.loading.model_folder import resolve_model
from nanocore.worker.model_cost import MachineSpeed
from nanocore.worker.models import load_model_config
from nanocore.worker.numerics import numerics_fingerprint
from nanocore.worker.rank_messages import WorkerInfo
from nanocore.worker.worker import LocalExecutor

logger = logging.getLogger(__name__)

_NO_GRAMMARS: Final = NoGrammars("structured_outputs: this engine has no vocabulary")


def run_engine(config: EngineConfig, parent: ParentLink | None) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        StartError: what kept the engine from serving.
    """
    imports_s = process_age_s()
    started_s = time.monotonic() - imports_s
    raise_descriptor_limit()
    config = config.for_device(select_device(config.device).type)
    with ExitStack() as stack:
        # Addresses and files first: one in use is told before the model takes time and memory.
        places = stack.enter_context(ExitStack())
        occupied = None if config.standby else occupy(config, places)
        folder = find_model(config)
        model_config = load_model_config(folder, config.hf_overrides)
        max_model_len = longest_request(config, model_config)
        files = ModelFiles(folder)
        log_beginning(config, folder, model_config, imports_s)
        vocabulary = VocabularyLoad(folder, model_config.vocab_size, model_config.eos_token_ids)
        stack.callback(vocabulary.close)
        executor = _executor(config, folder, model_config, max_model_len)
        stack.callback(executor.close)
        with phase("load") as notes:
            executor.load_model()
            notes.append("weights")
        if occupied is None:
            lock = stand_by(config.endpoint, executor, parent)
            if isinstance(lock, int):
                return lock
            started_s = time.monotonic()
            occupied = occupy(config, places, lock)
        with phase("profile") as notes:
            ranks = executor.profile()
            num_bytes = sum(rank.weight_bytes for rank in ranks)
            notes.append(f"{num_bytes / 1e6:.1f} MB of weights, {describe_workers(ranks)}")
        with phase("kv cache") as notes:
            num_blocks, max_model_len = size_cache(config, ranks, max_model_len)
            executor.allocate_kv_cache(num_blocks, max_model_len)
            executor.capture()
            num_bytes = num_blocks * sum(rank.kv_block_bytes for rank in ranks)
            notes.append(
                f"{num_blocks} blocks of {config.sizes.block_size} tokens, "
                f"{num_bytes / 1e6:.0f} MB, requests of {max_model_len} tokens at most"
            )
        speeds = machine_speeds(ranks)
        names = str(folder), model_config.architecture
        for line in summary(forecast(config, names, ranks, (num_blocks, max_model_len), speeds)):
            logger.info("%s", line)
        with phase("structured outputs") as notes:
            grammars = stack.enter_context(closing(vocabulary.wait(notes)))
        log_generation_defaults(model_config)
        sizes = num_blocks, max_model_len
        card = _model_card(config, folder, model_config, ranks, *sizes, files.entries)
        ready = (executor, started_s, occupied.publisher, parent, occupied.trace, grammars)
        used = Utilisation(joined_cost(ranks), MachineSpeed.joined(speeds))
        return serve(config, occupied.socket, card, files, *ready, utilisation=used)


def serve(
    config: EngineConfig,
    socket: EngineSocket,
    card: ModelCard,
    files: ModelFiles,
    executor: StepExecutor,
    started_s: float,
    publisher: KVEventPublisher | None = None,
    parent: ParentLink | None = None,
    trace: StepTrace | None = None,
    grammars: GrammarSource = _NO_GRAMMARS,
    utilisation: Utilisation | None = None,
) -> int:
    """Run the step loop and the io thread until told to stop; returns the exit code.

    Args:
        socket: bound to config's endpoint; closed at the end. card: what clients are told.
        files: those it names. executor: ready to run. started_s: monotonic time of the process's
            start, for the log. publisher: of KV events. parent: the launching client. trace: of
            the steps. grammars: of structured outputs. utilisation: what steps use is added to it.
    """
    inbox: Inbox = SimpleQueue()
    outbox = Outbox()
    kv_cache = KVCacheManager(card.num_blocks, card.block_size, config.enable_prefix_caching)
    if publisher is not None:
        kv_cache.subscribe(publisher.publish)
        publisher.start()
    scheduler = Scheduler(config.scheduler_config(card.max_model_len), kv_cache)
    switch = DeadMansSwitch(config.step_timeout_s + 2 * GRACE_S, StartError.exit_code)
    masks = None
    if not isinstance(grammars, NoGrammars):
        masks = MaskFiller(card.vocab_size, scheduler.config.max_num_seqs)
    clock = StepClock(switch, utilisation)
    core = EngineCore(scheduler, executor, inbox, outbox, trace, clock, masks)
    io_thread = _io_thread(config, socket, card, files, core, inbox, outbox, grammars, trace)
    watchdog = Watchdog(core, config.step_timeout_s, core.blame, outbox, io_thread)
    interrupted = handle_signals(inbox, outbox)
    if parent is not None:
        parent.on_orphaned(lambda: inbox.put(Shutdown("the launching client is gone")))
    gc.collect()
    gc.freeze()  # what start-up made lives on: keep the collector from walking it
    io_thread.start()
    watchdog.start()
    executor.on_failure(lambda reason: inbox.put(Shutdown(reason, failure=True)))
    logger.info("ready in %.1f s", time.monotonic() - started_s)
    if parent is not None:
        parent.report_ready()
    farewell, exit_code = run_core(core)
    watchdog.stop()
    if masks is not None:
        masks.close()
    outbox.put(farewell)
    io_thread.join()
    for line in utilisation.summary() if utilisation else ():
        logger.info("%s", line)
    logger.info("stopped: %s", farewell.reason)
    return 130 if interrupted and not farewell.failure else exit_code


def _model_card(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    ranks: list[WorkerInfo],
    num_blocks: int,
    max_model_len: int,
    files: list[ModelFile],
) -> ModelCard:
    return ModelCard(
        model=str(folder),
        architecture=model.architecture,
        dtype=ranks[0].dtype,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        block_size=config.sizes.block_size,
        num_blocks=num_blocks,
        default_sampling=model.generation.sampling(),
        files=files,
        hidden_size=model.hidden_size,
        numerics_fingerprint=numerics_fingerprint(ranks, model, max_model_len),
    )


def _io_thread(
    config: EngineConfig,
    socket: EngineSocket,
    card: ModelCard,
    files: ModelFiles,
    core: EngineCore,
    inbox: Inbox,
    outbox: Outbox,
    grammars: GrammarSource,
    trace: StepTrace | None,
) -> IoThread:
    """Made of its parts and not started; arguments as in `serve`."""
    counters, clock = core.scheduler.counters, core.clock
    queue_limit = QueueLimit(
        config.max_num_queued_reqs,
        config.max_num_queued_tokens,
        counters,
        config.max_num_queued_bytes,
    )
    client_limit = ClientLimit.of_this_process(config.max_num_clients)
    capabilities = config.capabilities
    if not isinstance(grammars, NoGrammars):
        capabilities.append("structured_outputs")
    reception = Reception(
        card,
        capabilities,
        config.sizes.max_num_seqs,
        client_limit,
        queue_limit,
        instance=secrets.token_hex(16),
        max_logprobs=config.max_logprobs,
    )
    desk = FrontDesk(
        socket,
        inbox,
        reception,
        Admission(card, config, queue_limit, grammars),
        CompilingRequests(grammars, queue_limit, outbox.put),
        ControlHandler(inbox, files, _metrics(config, card, core, queue_limit)),
        num_steps=lambda: counters.num_steps,
        step_age_ms=lambda: clock.age_ms,
        shutdown_timeout_s=config.shutdown_timeout,
    )
    stats_log = StatsLog(lambda: desk.completed(stats_of(core.scheduler, False)), time.monotonic())
    return IoThread(
        socket,
        client_limit.max_connections,
        desk,
        inbox,
        outbox,
        None if config.disable_log_stats else stats_log,
        trace=trace,
    )


def _metrics(
    config: EngineConfig, card: ModelCard, core: EngineCore, queue_limit: QueueLimit
) -> MetricsCollector:
    cache = {
        "block_size": str(card.block_size),
        "num_gpu_blocks": str(card.num_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "cache_dtype": config.kv_cache_dtype,
    }
    return MetricsCollector(core.scheduler, queue_limit.rejections, cache, core.clock.utilisation)


def run_core(core: EngineCore) -> tuple[Farewell, int]:
    """Run the step loop to its end; what clients are told of it, and the exit code."""
    try:
        shutdown = core.run()
    except StartError as error:  # a worker's
        return Farewell(str(error), failure=True), error.exit_code
    except Exception as error:
        logger.exception("the step loop failed")
        reason = f"internal error: {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return Farewell(f"out of memory in a step: {error}", True), CacheMemoryError.exit_code
        return Farewell(reason, failure=True), StartError.exit_code
    exit_code = StartError.exit_code if shutdown.failure else 0
    return Farewell(shutdown.reason, shutdown.failure), exit_code


def handle_signals(inbox: Inbox, outbox: Outbox) -> list[int]:
    """Let SIGTERM and SIGINT begin a drain, and a second one end the process.

    Returns the SIGINTs seen. SIGHUP, which ends the step loop, says that the terminal or the
    launching client is gone.
    """
    seen: list[int] = []
    interrupts: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(130)
        seen.append(number)
        if number == signal.SIGINT:
            interrupts.append(number)
        outbox.put(BeginDrain(signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, lambda *_: inbox.put(Shutdown("SIGHUP")))
    return interrupts


def find_model(config: EngineConfig) -> Path:
    """The folder of the model to serve, downloaded if it has to be."""
    if config.model is not None:
        try:
            return resolve_model(config.model, config.revision)
        except OSError as error:
            name = shorten(config.model)
            raise ModelFileError(f"--model {name}: {error.strerror or error}") from None
    if config.revision is not None:
        revision = shorten(config.revision)
        raise ConfigError(f"--revision {revision}: it is that of a --model, and none is given")
    folder = demo_model_folder()
    logger.info("no --model given: serving the demo model")
    return folder


def _executor(
    config: EngineConfig, folder: Path, model: ModelConfig, max_model_len: int
) -> Executor:
    worker_config = config.worker_config(str(folder), max_model_len)
    if worker_config.num_ranks == 1:
        return LocalExecutor(worker_config)
    return ProcessExecutor(worker_config, model.hidden_size)
