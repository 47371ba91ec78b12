"""What nanocore's scheduler and KV cache cost beside the model, in microseconds.

Each function measures one thing and returns one figure per repeat; objects of a step are dropped
outside the timed part, and the heap is frozen after set-up, as in an engine.

step_us      schedule() and update() of one steady decode step, mean over many steps, so that block
             crossings are in it
admit_us     one request: from the SUBMIT to a Request with all its block keys, add(), and the first
             schedule() of at most 8192 tokens; cold, or all but the last block cached
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.config import EngineConfig, SchedulerConfig
from nanocore.engine_core.grammars.grammar_compiler import NoGrammars
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import Capacity, KVCacheManager
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 65536
MAX_MODEL_LEN: Final = 65536
NUM_PROMPT_TOKENS: Final = 128
VOCAB_SIZE: Final = 151_936
EOS: Final = 151_645
_CARD = ModelCard(
    model="none", architecture="none", dtype="none", vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
)  # fmt: skip
_TOKEN: Final = np.dtype("<i4")
_now_ns = time.perf_counter_ns


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Collections within look at new objects only, as in an engine that has run for a while."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class NoModelExecutor:
    """In place of a model: answers a token for each row whose known tokens are all computed.

    num_rows: rows that plans may name. token_ids: what it answers, by position, in a circle.
    """

    def __init__(self, num_rows: int, token_ids: list[int]) -> None:
        self._token_ids = np.array(token_ids, _TOKEN)
        self._active = np.zeros(num_rows, bool)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_computed = np.zeros(num_rows, np.int64)
        self._counts = np.zeros(num_rows, np.int64)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the plan's differences and answer."""
        self._active[_column(plan.removed_rows)] = False
        for new in plan.added:
            self._active[new.row] = True
            self._num_tokens[new.row] = len(new.token_ids) // _TOKEN.itemsize
            self._num_computed[new.row] = new.num_computed_tokens
        np.copyto(self._counts, self._active)
        self._counts[_column(plan.chunk_rows)] = _column(plan.chunk_counts)
        self._num_computed += self._counts
        sampled = (self._counts > 0) & (self._num_computed >= self._num_tokens)
        (rows,) = np.nonzero(sampled)
        token_ids = self._token_ids[self._num_tokens[rows] % len(self._token_ids)]
        self._num_tokens[rows] += 1
        return ModelRunnerOutput(rows=rows.astype(_TOKEN).tobytes(), token_ids=token_ids.tobytes())


def _column(column: bytes) -> NDArray[np.int32]:
    return np.frombuffer(column, _TOKEN)


class _Engine:
    """A scheduler, admission before it, and an executor without a model behind it."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        config = SchedulerConfig(
            max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=MAX_MODEL_LEN
        )
        self.scheduler = Scheduler(config, KVCacheManager(Capacity(num_blocks, BLOCK_SIZE)))
        limit = QueueLimit(10**9, 10**12, self.scheduler.counters)
        self.admission = Admission(_CARD, EngineConfig(), limit, NoGrammars("no vocabulary"))
        self.executor = NoModelExecutor(1024, list(range(1000, 2000)))
        self._rng = random.Random(1)
        self._num_handles = 0

    def submit(self, num_tokens: int) -> Submit:
        """A request of random tokens, as it is when it has been decoded."""
        token_ids = [self._rng.randrange(VOCAB_SIZE - 1000) for _ in range(num_tokens)]
        sampling = EngineSamplingParams(temperature=0.7, top_p=0.95, max_tokens=30_000)
        prompt = np.array(token_ids, "<i4").tobytes()
        return Submit(request_id=f"{num_tokens}", prompt_token_ids=prompt, sampling=sampling)

    def add(self, submit: Submit) -> None:
        """Everything from the SUBMIT to the waiting queue."""
        self._num_handles += 1
        self.scheduler.add(self.admission.build(submit, self._num_handles, client=1))

    def start(self, num_requests: int) -> None:
        """Bring so many requests to decoding."""
        for _ in range(num_requests):
            self.add(self.submit(NUM_PROMPT_TOKENS))
        while self.scheduler.num_waiting or self.scheduler.running.prefilling:
            self.step()

    def step(self) -> None:
        """One step, untimed."""
        self.scheduler.update(self.executor.execute(self.scheduler.schedule()))

    def clear(self) -> None:
        """End every request."""
        self.scheduler.abort_all()
        self.step()


def step_us(num_requests: int, repeats: int) -> list[float]:
    """One steady decode step of so many requests."""
    engine = _Engine()
    scheduler, executor = engine.scheduler, engine.executor
    engine.start(num_requests)
    num_steps = 128 if num_requests <= 64 else 64  # more would fill the cache
    figures = []
    with frozen_heap():
        for _ in range(repeats + 1):
            spent_ns = 0
            for _ in range(num_steps):
                t0 = _now_ns()
                plan = scheduler.schedule()
                t1 = _now_ns()
                result = executor.execute(plan)
                t2 = _now_ns()
                outputs = scheduler.update(result)
                t3 = _now_ns()
                spent_ns += t3 - t2 + t1 - t0
                assert len(outputs[0].tokens.token_ids) == num_requests
                del plan, result, outputs
            figures.append(spent_ns / 1e3 / num_steps)
    return figures[1:]  # the first one warms up


def admit_us(num_tokens: int, repeats: int, cached: bool = False) -> list[float]:
    """One request, from its SUBMIT to its first plan, while nothing else runs."""
    engine = _Engine(num_blocks=16384)
    scheduler = engine.scheduler
    count = 64 if num_tokens <= 1024 else 4
    submits = [engine.submit(num_tokens) for _ in range(count)]
    figures = []
    with frozen_heap():
        for _ in range(repeats + 1):
            spent_ns = 0
            if not cached:
                assert scheduler.kv_cache.reset_prefix_cache()
            for submit in submits:
                t0 = _now_ns()
                engine.add(submit)
                plan = scheduler.schedule()
                spent_ns += _now_ns() - t0
                (new,) = plan.added
                num_cached = new.num_computed_tokens
                scheduler.update(engine.executor.execute(plan))
                while scheduler.running.prefilling:  # the rest of a long prompt
                    engine.step()
                engine.clear()
            figures.append(spent_ns / 1e3 / count)
        assert num_cached == (num_tokens - BLOCK_SIZE if cached else 0)
    return figures[1:]
