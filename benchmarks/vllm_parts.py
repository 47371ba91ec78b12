"""vLLM as overhead_vllm.py drives it: its scheduler, requests, and an executor without a model.

Settings are the same for every measurement: blocks of 16 tokens, xxhash, at most 8192 tokens and
1024 requests a step, no statistics, steps that do not overlap.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
PROMPT_LENGTH = 128
_MAX_MODEL_LEN = 65_536
_VOCAB_SIZE = 151_936  # of the real Qwen3, so that ids have as many bytes
_KV_CACHE_SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32
)
_LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(4)]
_random = random.Random(0)


class NoModel(Executor):
    """Answers at once: " the" for each request whose prompt, of PROMPT_LENGTH tokens, is done."""

    supported_tasks = ("generate",)

    def _init_executor(self) -> None:
        if multiprocessing.parent_process() is not None:  # we end even if the client is killed
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        self.spent_ns = 0
        self._token_id = get_tokenizer(self.model_config.tokenizer).encode(" the")[0]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """The output, or a future of it; spent_ns grows by what this took."""
        start_ns = time.perf_counter_ns()
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        done = {i: n + counts[i] >= PROMPT_LENGTH for i, n in computed.items()}
        output = _runner_output({i: [self._token_id] * is_done for i, is_done in done.items()})
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        self.spent_ns += time.perf_counter_ns() - start_ns
        return future if non_block else output

    def get_kv_cache_specs(self) -> Any:
        return [dict.fromkeys(_LAYERS, _KV_CACHE_SPEC)]

    def determine_available_memory(self) -> Any:
        return [_KV_CACHE_SPEC.page_size_bytes * len(_LAYERS) * 65_536]

    def get_supported_kv_cache_layouts(self) -> Any:
        return [["LBNHC"]]

    def collective_rpc(self, *_args: Any, **_kwargs: Any) -> Any:
        return [None]

    def _nothing(self, *_args: Any) -> None: ...

    set_kv_cache_layout = initialize_from_config = compile_or_warm_up_model = _nothing
    check_health = shutdown = supports_draft_weight_updates = _nothing


def engine_args(model: str, executor: type[Executor] | None = None) -> AsyncEngineArgs:
    """The settings; executor: a class, instead of a model."""
    return AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=_MAX_MODEL_LEN, max_num_seqs=1024,
        hf_overrides={"max_position_embeddings": _MAX_MODEL_LEN}, max_num_batched_tokens=8192,
        block_size=BLOCK_SIZE, enable_prefix_caching=True, prefix_caching_hash_algo="xxhash",
        async_scheduling=False, disable_log_stats=True, distributed_executor_backend=executor,
    )  # fmt: skip


@cache
def _config(model: str) -> tuple[VllmConfig, StructuredOutputManager]:
    config = engine_args(model).create_engine_config()
    return config, StructuredOutputManager(config)


def make_scheduler(model: str, num_blocks: int) -> Scheduler:
    """A scheduler with nothing to do, and an empty cache."""
    config, grammars = _config(model)
    config.cache_config.num_gpu_blocks = num_blocks
    group = KVCacheGroupSpec(_LAYERS, _KV_CACHE_SPEC)
    return Scheduler(vllm_config=config, kv_cache_config=KVCacheConfig(num_blocks, [], [group]),
                     structured_output_manager=grammars, block_size=BLOCK_SIZE,
                     log_stats=False)  # fmt: skip


def prefill(scheduler: Scheduler) -> None:
    """Step until every request has its first token."""
    while scheduler.waiting or any(r.num_output_tokens == 0 for r in scheduler.running):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, sample(scheduler, plan))


def sample(scheduler: Scheduler, plan: SchedulerOutput) -> ModelRunnerOutput:
    """What a model would answer: a random token for each request whose prompt is done."""
    requests = [scheduler.requests[request_id] for request_id in plan.num_scheduled_tokens]
    done = {r.request_id: r.num_computed_tokens >= r.num_tokens for r in requests}
    return _runner_output({i: make_prompt(int(is_done)) for i, is_done in done.items()})


def _runner_output(token_ids: dict[str, list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(token_ids),
        req_id_to_index={request_id: row for row, request_id in enumerate(token_ids)},
        sampled_token_ids=list(token_ids.values()),
    )


def make_prompt(length: int = PROMPT_LENGTH, vocab_size: int = _VOCAB_SIZE) -> list[int]:
    """Random ids."""
    return [_random.randrange(vocab_size) for _ in range(length)]


@cache
def block_hasher() -> Callable[[Request], list[Any]]:
    """Makes the hashes of a request's full blocks."""
    hash_function = get_hash_fn_by_name("xxhash")
    init_none_hash(hash_function)
    return get_request_block_hasher(BLOCK_SIZE, hash_function)


def make_request(length: int) -> Request:
    """A request as the scheduler takes it, with its block hashes."""
    return Request.from_engine_core_request(wire_request(make_prompt(length)), block_hasher())


def wire_request(prompt: list[int]) -> EngineCoreRequest:
    """A request as a client sends it; the id is as long as one of vLLM's server."""
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA)  # fmt: skip
    params.update_from_generation_config({}, eos_token_id=151_645)
    name = f"cmpl-{uuid.UUID(int=_random.getrandbits(128)).hex}-0"
    return EngineCoreRequest(
        request_id=f"{name}-{_random.getrandbits(32):08x}", external_req_id=name,
        prompt_token_ids=prompt, sampling_params=params, arrival_time=time.time(),
        mm_features=None, pooling_params=None, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
