"""An engine in this process: the real scheduler, step loop and worker, without sockets or clients.

What start-up and each step take can so be told apart, and steps be timed one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import xxhash

from benchmarks.gpu.session import NO_GRAPH, Session, read_report
from benchmarks.gpu.shapes import models
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.mailbox import Outbox
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import KeyChain, KVCacheManager
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.device.device import select_device
from nanocore.worker.executors.local_executor import LocalExecutor
from nanocore.worker.models import load_model_config


def common_settings(session: Session) -> dict[str, Any]:
    """What all engines of these benchmarks are started with."""
    sizes = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
    if session.small:
        sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        sizes["kv_cache_memory_bytes"] = 2**24
    return {
        "device": session.device.type,
        "enable_prefix_caching": False,
        "load_format": "dummy",
        **graph_settings(session),
        **sizes,
    }


def graph_settings(session: Session) -> dict[str, Any]:
    """No graphs, where the first engine did not start with them, or one could not be recorded."""
    first = [f"speed/{model}/start" for model in models(session)]
    for name, text in read_report(session.out, "engine").get("errors", {}).items():
        if name in first or (name.endswith("/start") and NO_GRAPH in text):
            return {"enforce_eager": True}
    return {}


@dataclass(slots=True)
class Generated:
    """Tokens of each request, by handle, and how many have ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_ended: int = 0


class LocalEngine:
    """An engine without clients.

    Args:
        folder: the model's. settings: of EngineConfig.

    Raises:
        StartError: as an engine would.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.phases_s: dict[str, float] = {}
        config = EngineConfig(**settings)
        config = self.config = config.for_device(select_device(config.device).type)
        model = load_model_config(folder)
        max_model_len = longest_request(config, model)
        with self._phase("build"):
            executor = LocalExecutor(config.worker_config(str(folder), max_model_len))
        with self._phase("load"):
            executor.load_model()
            ranks = executor.profile()
        num_blocks, max_model_len = size_cache(config, ranks, max_model_len)
        with self._phase("allocate and capture"):
            executor.allocate_kv_cache(num_blocks, max_model_len)
            executor.capture()
        self.executor, self.kernels, self.num_blocks = executor, ranks[0].kernels, num_blocks
        self.block_size = config.sizes.block_size
        kv_cache = KVCacheManager(num_blocks, self.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler_config(max_model_len), kv_cache)
        self._outbox = Outbox()
        self.core = EngineCore(self.scheduler, executor, SimpleQueue(), self._outbox)
        self._num_requests = 0

    def add(
        self, prompt: list[int], num_output_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> int:
        """Queue a request; returns its handle."""
        self._num_requests += 1
        handle = self._num_requests
        column = np.array(prompt, "<i4")
        key_chain = KeyChain(self.block_size, {}, xxhash.xxh3_128_digest)
        key_chain.extend(column.tobytes())
        self.scheduler.add(
            Request(
                handle=handle,
                request_id=str(handle),
                client=1,
                token_ids=column,
                max_num_tokens=len(prompt) + num_output_tokens,
                sampling=EngineSamplingParams(
                    temperature=temperature, max_tokens=num_output_tokens
                ),
                seed=seed,
                eos_token_ids=(),
                key_chain=key_chain,
            )
        )
        return handle

    def step(self, generated: Generated) -> float:
        """One turn of the step loop, its outputs taken; returns its seconds."""
        start_s = time.perf_counter()
        self.core.step()
        seconds = time.perf_counter() - start_s
        for output in self._outbox.drain():
            assert isinstance(output, ClientOutput)
            handles, ids = output.tokens.owner_of_each().tolist(), output.tokens.token_ids.tolist()
            for handle, token_id in zip(handles, ids, strict=True):
                generated.tokens.setdefault(handle, []).append(token_id)
            generated.num_ended += sum(event.finish_reason is not None for event in output.events)
        return seconds

    def run(self) -> Generated:
        """Step until all requests have ended."""
        generated = Generated()
        while self.scheduler.num_requests or self.scheduler.num_in_flight:
            self.step(generated)
        return generated

    def generate(
        self, prompts: list[list[int]], num_output_tokens: int, temperature: float = 0.0
    ) -> list[list[int]]:
        """Tokens of prompts that run together; the seed of each is its number."""
        handles = [self.add(p, num_output_tokens, temperature, i) for i, p in enumerate(prompts)]
        tokens = self.run().tokens
        return [tokens[handle] for handle in handles]

    def close(self) -> None:
        """Give the memory back."""
        self._outbox.close()
        self.executor.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Notes how long a block took."""
        start_s = time.perf_counter()
        yield
        self.phases_s[name] = round(time.perf_counter() - start_s, 3)
