"""The engine process from start to end: load, size the cache, serve, say goodbye.

Threads: main runs the step loop; `io` owns the socket, and detects a step that hangs; `masks-*` and
`grammars-*` serve structured outputs; `kv-events` exists if events are published, `parent-watch` if
a client launched us. The compile process tries grammars. Each start-up phase logs one line with its
seconds.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.drafting import make_proposer
from nanocore.engine_core.drafting.proposer import Proposer
from nanocore.engine_core.grammars.grammar_compiler import GrammarSource, NoGrammars, grammars_of
from nanocore.engine_core.grammars.mask_filler import MaskFiller
from nanocore.engine_core.grammars.token_table import VocabularySource
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.control_handler import ControlHandler
from nanocore.engine_core.io.handshake import welcome
from nanocore.engine_core.io.io_thread import IoThread, StatsLog, Watchdog
from nanocore.engine_core.io.limits import ClientLimit, QueueLimit, raise_descriptor_limit
from nanocore.engine_core.io.message_handler import MessageHandler
from nanocore.engine_core.io.served_files import ServedFiles, read_files
from nanocore.engine_core.log.metrics import EngineMetrics, completed, stats_of
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.mailbox import BeginDrain, Inbox, Outbox, Shutdown
from nanocore.engine_core.process.cache_size import CacheSize, longest_request, size_cache
from nanocore.engine_core.process.claimed_resources import claim_resources
from nanocore.engine_core.process.memory_table import joined_cost
from nanocore.engine_core.process.parent import ParentLink
from nanocore.engine_core.process.standby import stand_by
from nanocore.engine_core.process.start_log import describe_workers, log_beginning, log_settings
from nanocore.engine_core.process.start_parts import IdleWork, process_age_s, start_part
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.step_clock import DeadMansSwitch, StepClock
from nanocore.kv_cache import Capacity, KVCacheManager
from nanocore.protocol.errors import (
    CacheMemoryError,
    ConfigError,
    ModelFileError,
    StartError,
    StartReport,
    is_out_of_memory,
    shorten,
)
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets.engine_socket import EngineSocket
from nanocore.system.running import Running, registered
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.speculative_config import WORKER_METHODS
from nanocore.worker.cost.machine_speed import measure_speed
from nanocore.worker.cost.model_cost import MachineSpeed
from nanocore.worker.devices import native_library, select_device
from nanocore.worker.executors.executor import Executor, StepExecutor
from nanocore.worker.executors.process_executor import ProcessExecutor
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.model_folder import model_name, resolve_model
from nanocore.worker.models import load_model_config
from nanocore.worker.numerics import numerics_fingerprint
from nanocore.worker.rank_messages import WorkerInfo
from nanocore.worker.worker import LocalExecutor

if TYPE_CHECKING:
    from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher

logger = logging.getLogger(__name__)


def proposer_of(config: EngineConfig) -> Callable[[NDArray[np.int32]], Proposer] | None:
    """What makes the engine's proposer of drafts; None: there is none, or workers have it.

    Raises ConfigError: this installation cannot.
    """
    speculative = config.speculative
    if speculative is None or speculative.method in WORKER_METHODS:
        return None
    shares_outputs = config.enable_prefix_caching
    return partial(make_proposer, speculative, native_library(), shares_outputs)


GRACE_S: Final = 20.0
"""Time for the io thread to find a step that hangs, and to tell all clients."""
_MEASURED_SHARE: Final = 8
"""A measurement takes 1/8 of a rank's memory: an engine that is short of it starts all the same."""
_NO_GRAMMARS: Final = NoGrammars("structured_outputs: this engine has no vocabulary")


def run_engine(config: EngineConfig, parent: ParentLink | None, files: ServedFiles | None) -> int:
    """Serve until told to stop; return the exit code. files: if they are known.

    Raises:
        StartError: the engine cannot serve.
    """
    imports_s = process_age_s()
    started_s = time.monotonic() - imports_s
    raise_descriptor_limit()
    config = config.for_device(select_device(config.device).type)
    proposer = proposer_of(config)
    with ExitStack() as stack:
        # Endpoints and files first: one in use is reported before the model takes time and memory.
        # Their stack is entered first, too, so that they are given back last.
        claims = stack.enter_context(ExitStack())
        claimed = None if config.standby else claim_resources(config, claims)
        folder = find_model(config)
        with start_part("files"):
            files = files or read_files(folder, parent)
            overrides = config.hf_overrides, config.override_generation_config
            model_config = load_model_config(folder, *overrides)
        max_model_len = longest_request(config, model_config)
        log_beginning(config, folder, model_config, imports_s)
        with start_part("executor", "kernels chosen, ranks started"):
            executor = _executor(config, folder, model_config, max_model_len)
            stack.callback(executor.close)
        with start_part("load", "weights"):
            executor.load_model()
        if claimed is None:
            lock = stand_by(config.endpoint, executor, parent)
            if isinstance(lock, int):
                return lock
            started_s = time.monotonic()
            claimed = claim_resources(config, claims, lock)
        ranks = _profile(executor)
        size = _allocate(config, executor, ranks, max_model_len)
        utilisation, later = _machine_use(ranks)
        vocabulary = _vocabulary_source(folder, files, model_config)
        grammars = stack.enter_context(closing(grammars_of(vocabulary)))
        if not isinstance(grammars, NoGrammars):
            later.append(grammars.prepare)
        log_settings(config, model_config, ranks, size)
        return serve(
            config,
            claimed.socket,
            _model_card(config, folder, model_config, ranks, size, files),
            size.capacity,
            files,
            executor,
            started_s,
            publisher=claimed.publisher,
            parent=parent,
            trace=claimed.trace,
            grammars=grammars,
            later=later,
            utilisation=utilisation,
            proposer=proposer,
        )


def _machine_use(ranks: list[WorkerInfo]) -> tuple[Utilisation, list[Callable[[], None]]]:
    """Return what adds up steps, and what is left for later."""
    cost = joined_cost(ranks)
    if gpus := [rank.speed for rank in ranks if rank.speed is not None]:
        return Utilisation(cost, MachineSpeed.joined(gpus)), []
    utilisation = Utilisation(cost, None)

    def measure() -> None:
        """Measure the CPU, whose cores the ranks share: all at once."""
        max_bytes = min(rank.memory_bytes for rank in ranks) // _MEASURED_SHARE
        dtype = getattr(torch, ranks[0].dtype)
        utilisation.speed = measure_speed(torch.device("cpu"), dtype, room_bytes=max_bytes)

    return utilisation, [measure]


def _vocabulary_source(folder: Path, files: ServedFiles, model: ModelConfig) -> VocabularySource:
    name = folder if is_gguf(folder) else folder / "tokenizer.json"
    content = files.content("tokenizer.json")
    return VocabularySource(content, str(name), model.vocab_size, model.eos_token_ids)


def serve(
    config: EngineConfig,
    socket: EngineSocket,
    card: ModelCard,
    capacity: Capacity,
    files: ServedFiles,
    executor: StepExecutor,
    started_s: float,
    publisher: KVEventPublisher | None = None,
    parent: ParentLink | None = None,
    trace: StepTrace | None = None,
    grammars: GrammarSource = _NO_GRAMMARS,
    later: Sequence[Callable[[], None]] = (),
    utilisation: Utilisation | None = None,
    proposer: Callable[[NDArray[np.int32]], Proposer] | None = None,
) -> int:
    """Run the step loop and the io thread until told to stop; return the exit code.

    Args:
        socket: bound to config's endpoint; closed at the end.
        files: the ones that card lists.
        executor: has loaded the model and allocated its KV cache.
        started_s: monotonic time of the process's start, for the log.
        later: what is done in idle moments, see `IdleWork`.
        parent: link to the launching client. proposer: see `Scheduler`.
    """
    inbox: Inbox = SimpleQueue()
    outbox = Outbox()
    kv_cache = _kv_cache(config, capacity, publisher)
    scheduler = Scheduler(config.scheduler_config(card.max_model_len), kv_cache, proposer=proposer)
    switch = DeadMansSwitch(config.step_timeout_s + GRACE_S, StartError.exit_code)
    has_masks, most = not isinstance(grammars, NoGrammars), scheduler.config.max_samples
    masks = MaskFiller(card.vocab_size, most) if has_masks else None
    core = EngineCore(scheduler, executor, inbox, outbox, trace, StepClock(switch), masks)
    io_thread = _io_thread(
        config, socket, card, files, core, inbox, outbox, grammars, trace, utilisation
    )
    signals = handle_signals(inbox, outbox)
    if parent is not None:
        parent.on_orphaned(lambda: inbox.put(Shutdown("the launching client is gone")))
    gc.collect()
    gc.freeze()  # what start-up made lives on: keep the collector from walking it
    io_thread.start()
    executor.on_failure(lambda reason: inbox.put(Shutdown(reason, failure=True)))
    running = _running(config, card.model, parent)
    with registered(running), IdleWork(lambda: not scheduler.num_requests, later):
        logger.info("ready in %.1f s", time.monotonic() - started_s)
        if parent is not None:
            parent.report(StartReport())
        farewell, exit_code = run_core(core)
    core.clock.rest()
    if masks is not None:
        masks.close()
    outbox.put(farewell)
    io_thread.join()
    for line in utilisation.summary() if utilisation else ():
        logger.info("%s", line)
    logger.info("stopped: %s", farewell.reason)
    return 130 if signal.SIGINT in signals and not farewell.failure else exit_code


def _kv_cache(
    config: EngineConfig, capacity: Capacity, publisher: KVEventPublisher | None
) -> KVCacheManager:
    kv_cache = KVCacheManager(capacity, config.enable_prefix_caching)
    if publisher is not None:
        kv_cache.subscribe(publisher.publish)
        publisher.start()
    return kv_cache


def _running(config: EngineConfig, model: str, parent: ParentLink | None) -> Running:
    return Running(
        kind="engine",
        pid=os.getpid(),
        address=config.endpoint,
        model=model,
        endpoints=(config.endpoint,),
        curve_dir=config.curve_dir and os.path.abspath(config.curve_dir),
        launched_by=None if parent is None else os.getppid(),
        step_trace=config.step_trace and os.path.abspath(config.step_trace),
    )


def _profile(executor: Executor) -> list[WorkerInfo]:
    with start_part("profile") as notes:
        ranks = executor.profile()
        num_bytes = sum(rank.weight_bytes for rank in ranks)
        notes.append(f"{num_bytes / 1e6:.1f} MB of weights, {describe_workers(ranks)}")
    return ranks


def _allocate(
    config: EngineConfig,
    executor: Executor,
    ranks: list[WorkerInfo],
    max_model_len: int,
) -> CacheSize:
    """Size and allocate the KV cache."""
    with start_part("kv cache") as notes:
        size = size_cache(config, ranks, max_model_len)
        executor.allocate_kv_cache(size.capacity.num_slabs, size.max_model_len, size.kv_groups)
        num_bytes = sum(map(size.rank_bytes, ranks))
        notes.append(
            f"{size.capacity.shared_blocks} of {size.capacity.block_size} tokens, "
            f"{num_bytes / 1e6:.0f} MB, requests of {size.max_model_len} tokens at most"
        )
    return size


def _model_card(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    ranks: list[WorkerInfo],
    size: CacheSize,
    files: ServedFiles,
) -> ModelCard:
    return ModelCard(
        model=model_name(config.model, folder),
        architecture=model.architecture,
        dtype=ranks[0].dtype,
        vocab_size=model.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        block_size=config.sizes.block_size,
        num_blocks=size.capacity.num_blocks,
        default_sampling=model.generation.sampling(),
        files=files.entries,
        hidden_size=model.hidden_size,
        numerics_fingerprint=numerics_fingerprint(ranks, model, size.max_model_len),
    )


def _io_thread(
    config: EngineConfig,
    socket: EngineSocket,
    card: ModelCard,
    files: ServedFiles,
    core: EngineCore,
    inbox: Inbox,
    outbox: Outbox,
    grammars: GrammarSource,
    trace: StepTrace | None,
    utilisation: Utilisation | None,
) -> IoThread:
    counters, clock = core.scheduler.counters, core.clock
    queue_limit = QueueLimit(
        config.max_num_queued_reqs,
        config.max_num_queued_tokens,
        counters,
        config.max_num_queued_bytes,
    )
    cache_labels = {
        "block_size": str(card.block_size),
        "num_gpu_blocks": str(card.num_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "cache_dtype": config.kv_cache_dtype,
    }
    metrics = EngineMetrics(core.scheduler, queue_limit.rejections, cache_labels, utilisation)
    client_limit = ClientLimit.of_this_process(config.max_num_clients)
    capabilities = config.capabilities
    if not isinstance(grammars, NoGrammars):
        capabilities.append("structured_outputs")
    instance = secrets.token_hex(16)
    handler = MessageHandler(
        socket,
        inbox,
        welcome(card, config, capabilities, client_limit.max_num_clients, instance),
        Admission(card, config, queue_limit, grammars, core.scheduler.kv_cache.capacity),
        ControlHandler(inbox, files, metrics),
        num_steps=lambda: counters.num_steps,
        step_age_ms=lambda: clock.age_ms,
        shutdown_timeout_s=config.shutdown_timeout,
    )
    stats_log = StatsLog(
        lambda: completed(stats_of(core.scheduler, False), handler.counts()), time.monotonic()
    )
    return IoThread(
        socket,
        client_limit.max_connections,
        handler,
        inbox,
        outbox,
        None if config.disable_log_stats else stats_log,
        Watchdog(core, config.step_timeout_s),
        trace=trace,
    )


def run_core(core: EngineCore) -> tuple[Shutdown, int]:
    """Run the step loop to its end; return the farewell to clients and the exit code."""
    try:
        shutdown = core.run()
    except StartError as error:  # a worker's
        return Shutdown(str(error), failure=True), error.exit_code
    except Exception as error:
        logger.exception("the step loop failed")
        reason = f"internal error: {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return Shutdown(f"out of memory in a step: {error}", True), CacheMemoryError.exit_code
        return Shutdown(reason, failure=True), StartError.exit_code
    return shutdown, StartError.exit_code if shutdown.failure else 0


def handle_signals(inbox: Inbox, outbox: Outbox) -> list[int]:
    """Let SIGTERM and SIGINT begin a drain, and a second one end the process.

    SIGHUP ends the step loop: the terminal or the launching client is gone. Returns a list that
    takes the signal that began the drain.
    """
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(130)
        seen.append(number)
        outbox.put(BeginDrain(signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, lambda *_: inbox.put(Shutdown("SIGHUP")))
    return seen


def find_model(config: EngineConfig) -> Path:
    """Return the folder of the model to serve; download it if necessary."""
    if config.model is not None:
        try:
            return resolve_model(config.model, config.revision)
        except OSError as error:
            name = shorten(config.model)
            raise ModelFileError(f"--model {name}: {error.strerror or error}") from None
    if config.revision is not None:
        revision = shorten(config.revision)
        raise ConfigError(f"--revision {revision} needs --model")
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
