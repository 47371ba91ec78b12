"""An engine in this process: the real scheduler, step loop and worker, without sockets or clients.

What start-up and each step take can so be told apart, and steps be timed and profiled one by one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.gpu.results import NO_GRAPH, Results
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.mailbox import Outbox
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import KeyChain, KVCacheManager
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.devices import select_device
from nanocore.worker.models import load_model_config
from nanocore.worker.worker import LocalExecutor


def engine_settings(results: Results) -> dict[str, Any]:
    """What all engines of these benchmarks are started with.

    No graphs, where the first engine did not start with them, or one could not be recorded.
    """
    session = results.session
    settings: dict[str, Any] = {
        "device": session.device.type, "enable_prefix_caching": False,
        "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384,
    }  # fmt: skip
    if session.small:
        settings |= {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512,
                     "kv_cache_memory_bytes": 2**24}  # fmt: skip
    for name, text in results.records.errors.items():
        if name.endswith("/start") and (name.startswith("speed/") or NO_GRAPH in text):
            settings["enforce_eager"] = True
    return settings


class LocalEngine:
    """An engine without clients. tokens: of each request, by handle.

    Args:
        folder: the model's. settings: of EngineConfig.

    Raises:
        StartError: as an engine would.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.phases_s: dict[str, float] = {}
        config = EngineConfig(**settings)
        config = self.config = config.for_device(select_device(config.device).type)
        max_model_len = longest_request(config, load_model_config(folder))
        with self._phase("build"):
            executor = LocalExecutor(config.worker_config(str(folder), max_model_len))
        with self._phase("load"):
            executor.load_model()
            ranks = executor.profile()
        size = size_cache(config, ranks, max_model_len)
        with self._phase("allocate and capture"):
            executor.allocate_kv_cache(size.capacity.num_slabs, size.max_model_len, size.kv_groups)
        self._executor, self.kernels, self.num_blocks = (
            executor,
            ranks[0].kernels,
            size.capacity.num_blocks,
        )
        self._block_size = size.capacity.block_size
        kv_cache = KVCacheManager(size.capacity, config.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler_config(size.max_model_len), kv_cache)
        self._outbox = Outbox()
        self._core = EngineCore(self.scheduler, executor, SimpleQueue(), self._outbox)
        self._num_requests = 0
        self.tokens: dict[int, list[int]] = {}

    def add(
        self, prompt: list[int], num_output_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> int:
        """Queue a request; returns its handle."""
        self._num_requests += 1
        handle, column = self._num_requests, np.array(prompt, "<i4")
        key_chain = KeyChain(self._block_size, {}, xxhash.xxh3_128_digest)
        key_chain.extend(column.tobytes())
        sampling = EngineSamplingParams(temperature=temperature, max_tokens=num_output_tokens)
        request = Request(
            handle=handle,
            request_id=str(handle),
            client=1,
            token_ids=column,
            max_num_tokens=len(prompt) + num_output_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_ids=(),
            key_chain=key_chain,
        )
        self.tokens[handle] = []
        self.scheduler.add(request)
        return handle

    def step(self) -> float:
        """One turn of the step loop, its outputs taken; returns its seconds."""
        start_s = time.perf_counter()
        self._core.step()
        seconds = time.perf_counter() - start_s
        for output in self._outbox.drain():
            assert isinstance(output, ClientOutput)
            handles, ids = output.tokens.owner_of_each().tolist(), output.tokens.token_ids.tolist()
            for handle, token_id in zip(handles, ids, strict=True):
                self.tokens[handle].append(token_id)
        return seconds

    def run(self) -> None:
        """Step until all requests have ended."""
        while self.scheduler.num_requests or self.scheduler.running.in_flight:
            self.step()

    def generate(self, prompts: list[list[int]], num_output_tokens: int) -> list[list[int]]:
        """Tokens of prompts that run together, every second greedy; a seed is a prompt's number."""
        handles = [self.add(p, num_output_tokens, float(i % 2), i) for i, p in enumerate(prompts)]
        self.run()
        return [self.tokens[handle] for handle in handles]

    def close(self) -> None:
        """Give the device's memory back."""
        self._outbox.close()
        self._executor.close()
        del self._core, self._executor, self.scheduler
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Notes how long a block took."""
        start_s = time.perf_counter()
        yield
        self.phases_s[name] = round(time.perf_counter() - start_s, 3)
