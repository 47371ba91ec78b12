"""What vLLM's bookkeeping costs, without a model: the peer half of overhead.py.

    python benchmarks/overhead_vllm.py --model DIR --repeats 3 --only step_256,admit_128

Runs in an interpreter that has vLLM 0.32, and imports nothing of nanocore. Prints one JSON object:
`versions`, and `figures`, which lists microseconds of each key, one per repeat after a warm-up:

- step_B: schedule() and update_from_output() of a step in which B requests decode a token each, no
  statistics. Mean over 128 steps (of more than 64 requests: 64), so block boundaries count.
- admit_N: a prompt of N tokens, nothing else running: making the request with all block hashes,
  add_request(), the first schedule(). cold: nothing is cached. hit: all but the last block is.

Blocks hold 16 tokens, prompts 128 unless named otherwise, a step at most 8192 and 1024 requests.
Hashes are xxhash. The collector runs, the heap frozen after set-up as an engine's. Objects of a
step are dropped outside the timed part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
import uuid
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any

os.environ.update(DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                  VLLM_CPU_KVCACHE_SPACE="1", VLLM_HOST_IP="127.0.0.1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")  # fmt: skip

import torch
import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
PROMPT_LENGTH = 128
_MAX_MODEL_LEN = 65_536
_VOCAB_SIZE = 151_936  # of the real Qwen3, so that ids have as many bytes
_WARM_UP_STEPS = 16
_KV_CACHE_SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32
)
_LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(4)]
_random = random.Random(0)
_now_ns = time.perf_counter_ns


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a small Qwen3")
    parser.add_argument("--repeats", type=int, required=True, help="figures per key")
    parser.add_argument("--only", required=True, metavar="KEY,KEY", help=", ".join(_MEASURES))
    arguments = parser.parse_args()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints as well
    torch.set_num_threads(1)
    enable_envs_cache()  # as an engine core does
    figures = {}
    for key in filter(None, arguments.only.split(",")):
        figures[key] = _MEASURES[key](arguments.model, arguments.repeats)
        print(key, figures[key], file=sys.stderr, flush=True)
    packages = {name: version(name) for name in ("torch", "msgspec", "tokenizers", "xxhash")}
    versions = {"python": platform.python_version(), "vllm": vllm.__version__, **packages}
    with report:
        print(json.dumps({"versions": versions, "figures": figures}), file=report)


def measure_step(model: str, repeats: int, num_requests: int) -> list[float]:
    """step_B."""
    num_steps = 128 if num_requests <= 64 else 64
    scheduler = _decoding_scheduler(model, num_requests, _WARM_UP_STEPS + num_steps * repeats)
    _mean_us(lambda: _decode_step(scheduler), _WARM_UP_STEPS)
    return [_mean_us(lambda: _decode_step(scheduler), num_steps) for _ in range(repeats)]


def measure_admission(model: str, repeats: int, length: int, hit: bool) -> list[float]:
    """admit_N: 64 short or 4 long prompts, one after the other."""
    scheduler = make_scheduler(model, 16_384)
    prompts = [make_prompt(length) for _ in range(64 if length <= 128 else 4)]
    _freeze_heap()
    figures = []
    for repeat in range(-1, repeats):
        cold = not hit or repeat == -1
        assert not cold or scheduler.reset_prefix_cache()
        spent_ns = sum(_admit(scheduler, p, 0 if cold else length - BLOCK_SIZE) for p in prompts)
        figures.append(spent_ns / 1e3 / len(prompts))
    return figures[1:]


def _admit(scheduler: Scheduler, prompt: list[int], num_hit_tokens: int) -> int:
    submitted = wire_request(prompt)
    start_ns = _now_ns()
    request = Request.from_engine_core_request(submitted, block_hasher())
    scheduler.add_request(request)
    plan = scheduler.schedule()
    spent_ns = _now_ns() - start_ns
    assert len(request.block_hashes) == len(prompt) // BLOCK_SIZE
    assert plan.scheduled_new_reqs[0].num_computed_tokens == num_hit_tokens
    scheduler.update_from_output(plan, sample(scheduler, plan))
    prefill(scheduler)  # the rest of it
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.finished_req_ids = set()
    return spent_ns


_MEASURES: dict[str, Callable[[str, int], list[float]]] = {
    **{f"step_{b}": partial(measure_step, num_requests=b) for b in (1, 16, 64, 256, 1024)},
    "admit_128": partial(measure_admission, length=128, hit=False),
    "admit_32768_cold": partial(measure_admission, length=32_768, hit=False),
    "admit_32768_hit": partial(measure_admission, length=32_768, hit=True),
}


def _mean_us(step: Callable[[], tuple[int, Any]], num_steps: int) -> float:
    """Mean of the nanoseconds that steps return; what else they return is dropped untimed."""
    return sum(step()[0] for _ in range(num_steps)) / 1e3 / num_steps


def _freeze_heap() -> None:
    """Take what there is out of the collector's sight, as an engine does after its start."""
    gc.unfreeze()
    freeze_gc_heap()


def _decoding_scheduler(model: str, num_requests: int, num_steps: int) -> Scheduler:
    """A scheduler whose requests have done their prompts, with blocks for so many steps."""
    blocks_each = (PROMPT_LENGTH + num_steps) // BLOCK_SIZE + 2
    scheduler = make_scheduler(model, max(65_536, num_requests * blocks_each))
    _freeze_heap()
    for _ in range(num_requests):
        scheduler.add_request(make_request(PROMPT_LENGTH))
    prefill(scheduler)
    return scheduler


def _decode_step(scheduler: Scheduler) -> tuple[int, EngineCoreOutputs]:
    """Nanoseconds in the scheduler, and the step's outputs, to be dropped later."""
    start_ns = _now_ns()
    plan = scheduler.schedule()
    spent_ns = _now_ns() - start_ns
    sampled = sample(scheduler, plan)
    start_ns = _now_ns()
    outputs = scheduler.update_from_output(plan, sampled)
    spent_ns += _now_ns() - start_ns
    assert len(outputs[0].outputs) == len(scheduler.requests), "each request got its token"
    return spent_ns, outputs[0]


@cache
def _config(model: str) -> tuple[VllmConfig, StructuredOutputManager]:
    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=_MAX_MODEL_LEN, max_num_seqs=1024,
        hf_overrides={"max_position_embeddings": _MAX_MODEL_LEN}, max_num_batched_tokens=8192,
        block_size=BLOCK_SIZE, enable_prefix_caching=True, prefix_caching_hash_algo="xxhash",
        async_scheduling=False, disable_log_stats=True,
    )  # fmt: skip
    config = arguments.create_engine_config()
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
    names = [request.request_id for request in requests]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[
            make_prompt(int(r.num_computed_tokens >= r.num_tokens)) for r in requests
        ],
    )


def make_prompt(length: int) -> list[int]:
    """Random ids."""
    return [_random.randrange(_VOCAB_SIZE) for _ in range(length)]


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
    """A request as a client sends it."""
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA)  # fmt: skip
    params.update_from_generation_config({}, eos_token_id=151_645)
    name = uuid.uuid4().hex
    return EngineCoreRequest(
        request_id=name, external_req_id=name,
        prompt_token_ids=prompt, sampling_params=params, arrival_time=time.time(),
        mm_features=None, pooling_params=None, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
