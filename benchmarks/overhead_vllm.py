"""What vLLM's bookkeeping costs, without a model: the peer half of overhead.py.

    python benchmarks/overhead_vllm.py --model DIR --repeats 3 [--only step_256,core_256]

Runs in an interpreter that has vLLM 0.32, and imports nothing of nanocore. Prints one JSON object:
`versions`, and `figures`, which lists microseconds of each key, one per repeat after a warm-up:

- step_B: schedule() and update_from_output() of a step in which B requests decode a token each, no
  statistics. Mean over 128 steps (of more than 64 requests: 64), so block boundaries count.
- admit_N: a prompt of N tokens, nothing else running: making the request with all block hashes,
  add_request(), the first schedule(). cold: nothing is cached. hit: all but the last block is.
- blocks_K_cold, blocks_K_evict: per block, allocate and free a prompt of K blocks whose hashes are
  known. cold: blocks that held nothing. evict: each block drops the hash of an older one.
- submit_N: encode and decode a request of N prompt tokens; outputs_B: outputs of B tokens.
- client_256: per token, a step's 256 tokens to text, into the streams' queues and out of them.
- core_256: a step of the engine core at 256 requests, without the executor's share.
- both_core_cpu_256, both_client_cpu_256: CPU time per token of engine process and client process:
  256 streams of 128 + 128 tokens, with text, over ZMQ. The core does not wait, so tokens of several
  steps reach a stream as one output where the client falls behind.

Blocks hold 16 tokens, prompts 128 unless named otherwise, a step at most 8192. Hashes are xxhash.
Ids are random below 151,936 (client_256: text; both: below 2000, answered by " the"). The executor
answers at once. The collector runs, the heap frozen after set-up as an engine's. Objects of a step
are dropped outside the timed part.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any

os.environ.update(DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                  VLLM_CPU_KVCACHE_SPACE="1", VLLM_HOST_IP="127.0.0.1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")  # fmt: skip

import torch
import vllm
from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_parts import (
    BLOCK_SIZE,
    PROMPT_LENGTH,
    NoModel,
    block_hasher,
    engine_args,
    make_prompt,
    make_request,
    make_scheduler,
    prefill,
    sample,
    wire_request,
)

_WARM_UP_STEPS = 16
_TEXT = (
    "An engine keeps the keys and values of every token it has read. When two questions begin "
    "alike, the second should not pay for the first part again: its blocks are hashed, found and "
    "shared. In 2024 a busy server answered 1,250 requests per minute. Café, naïve and 東京 need "
    "more than one byte per letter, so the decoder holds a token back until its bytes are whole. "
)
_now_ns = time.perf_counter_ns


def main() -> None:
    """Parse the command line, measure, print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `finally` runs
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a small Qwen3")
    parser.add_argument("--repeats", type=int, default=3, help="figures per key (default: 3)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(_MEASURES),
                        metavar="KEY,KEY", help=f"of {', '.join(_MEASURES)}")  # fmt: skip
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(_MEASURES):
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(_MEASURES)}")
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: at least 1")

    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints as well
    torch.set_num_threads(1)
    enable_envs_cache()  # as an engine core does
    figures: dict[str, list[float]] = {}
    try:
        for key, measure in _MEASURES.items():
            if key in arguments.only:
                figures[key] = measure(arguments.model, arguments.repeats)
                print(key, figures[key], file=sys.stderr, flush=True)
    finally:
        for child in multiprocessing.active_children():  # none, if all went well
            child.kill()
            child.join()
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


def measure_blocks(model: str, repeats: int, num_blocks: int, evict: bool) -> list[float]:
    """blocks_K: 12,288 blocks in a cache that holds more of them (cold), or a third (evict)."""
    manager = make_scheduler(model, 4_097 if evict else 16_384).kv_cache_manager
    length, num_requests = num_blocks * BLOCK_SIZE, 12_288 // num_blocks
    requests = [make_request(length) for _ in range(num_requests)]
    _freeze_heap()
    figures = []
    for repeat in range(-1, repeats):
        if not evict:
            assert manager.reset_prefix_cache()
        elif repeat >= 0:
            assert len(manager.block_pool.cached_block_hash_to_block) == 4_096, "all are hashed"
        spent_ns = 0
        for request in requests:
            start_ns = _now_ns()
            allocated = manager.allocate_slots(request, length)
            manager.free(request)
            spent_ns += _now_ns() - start_ns
            assert allocated is not None
            del allocated
        figures.append(spent_ns / 1e3 / 12_288)
    return figures[1:]


def measure_submit(_model: str, repeats: int, length: int) -> list[float]:
    """submit_N: as the client encodes it, and the core's input thread decodes it."""
    request, encoder = wire_request(make_prompt(length)), MsgpackEncoder()
    decoder = MsgpackDecoder(EngineCoreRequest)
    return _both_ways_us(lambda: encoder.encode(request), decoder, repeats)


def measure_outputs(model: str, repeats: int, num_requests: int) -> list[float]:
    """outputs_B: what a scheduler put out for a decode step, without statistics."""
    outputs = _decode_step(_decoding_scheduler(model, num_requests, 1))[1]
    outputs.weight_version = "default"  # as the core adds
    assert outputs.scheduler_stats is None
    encoder, buffer, decoder = MsgpackEncoder(), bytearray(), MsgpackDecoder(EngineCoreOutputs)
    return _both_ways_us(lambda: encoder.encode_into(outputs, buffer), decoder, repeats)


def measure_core(model: str, repeats: int) -> list[float]:
    """core_256: step_fn() and post_step() of an engine core in this process."""
    core = EngineCore(engine_args(model, NoModel).create_engine_config(), NoModel, log_stats=False)
    for _ in range(256):
        core.add_request(core.preprocess_add_request(wire_request(make_prompt()))[0])
    while core.scheduler.waiting:
        core.step_fn()

    def step() -> tuple[int, Any]:
        core.model_executor.spent_ns = 0
        start_ns = _now_ns()
        outputs, _ = core.step_fn()
        core.post_step(True)
        spent_ns = _now_ns() - start_ns - core.model_executor.spent_ns
        assert len(outputs[0].outputs) == 256
        return spent_ns, outputs

    _mean_us(step, _WARM_UP_STEPS)
    figures = [_mean_us(step, 64) for _ in range(repeats)]
    core.shutdown()
    return figures


def measure_client(model: str, repeats: int) -> list[float]:
    """client_256: process_outputs() of a whole step, then get_nowait() of every stream."""
    disable_envs_cache()  # which only engine cores have
    tokenizer = get_tokenizer(model)
    text = tokenizer.encode(_TEXT, add_special_tokens=False) * 8
    starts = [7 * stream % (len(text) // 8) for stream in range(256)]
    _freeze_heap()

    def measure() -> float:
        processor = OutputProcessor(tokenizer, log_stats=False)
        requests = [wire_request(text[start : start + PROMPT_LENGTH]) for start in starts]
        queues = [RequestOutputCollector(RequestOutputKind.DELTA, r.request_id) for r in requests]
        for request, queue in zip(requests, queues, strict=True):
            processor.add_request(request, None, queue=queue)
        positions = itertools.count(PROMPT_LENGTH)

        def step() -> tuple[int, Any]:
            position = next(positions)
            outputs = [EngineCoreOutput(request.request_id, [text[start + position]])
                       for request, start in zip(requests, starts, strict=True)]  # fmt: skip
            start_ns = _now_ns()
            processor.process_outputs(outputs, time.monotonic(), None, weight_version="default")
            taken = [queue.get_nowait() for queue in queues]
            spent_ns = _now_ns() - start_ns
            assert any(output.outputs[0].text for output in taken)
            return spent_ns, taken

        _mean_us(step, _WARM_UP_STEPS)
        return _mean_us(step, 128) / 256

    return [measure() for _ in range(1 + repeats)][1:]


@cache
def measure_both(model: str, repeats: int) -> dict[str, list[float]]:
    """both_core_cpu_256 ("core"), both_client_cpu_256 ("client"): the same runs serve for both."""
    disable_envs_cache()
    return asyncio.run(_run_streams(model, repeats))


async def _run_streams(model: str, repeats: int) -> dict[str, list[float]]:
    """An engine process, and this one as its client; CPU time of all their threads."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA)  # fmt: skip
    engine = AsyncLLM.from_engine_args(engine_args(model, NoModel))

    async def stream(name: str) -> int:
        prompt = {"prompt_token_ids": make_prompt(vocab_size=1000)}
        outputs = engine.generate(prompt, params, name)
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    figures: dict[str, list[float]] = {"core": [], "client": []}
    try:
        (core,) = multiprocessing.active_children()
        clocks = {"core": (~core.pid << 3) | 2, "client": time.CLOCK_PROCESS_CPUTIME_ID}
        _freeze_heap()  # as vLLM's server does
        for repeat in range(-1, repeats):
            before_ns = {name: time.clock_gettime_ns(clock) for name, clock in clocks.items()}
            async with asyncio.timeout(120):
                counts = await asyncio.gather(*(stream(f"{repeat}-{i}") for i in range(256)))
            assert sum(counts) == 256 * 128, f"{sum(counts)} tokens"
            for name, clock in clocks.items():
                spent_ns = time.clock_gettime_ns(clock) - before_ns[name]
                figures[name].append(spent_ns / 1e3 / sum(counts))
    finally:
        engine.shutdown()
    return {name: values[1:] for name, values in figures.items()}


_MEASURES: dict[str, Callable[[str, int], list[float]]] = {
    **{f"step_{b}": partial(measure_step, num_requests=b) for b in (1, 16, 64, 256, 1024)},
    "admit_128": partial(measure_admission, length=128, hit=False),
    "admit_32768_cold": partial(measure_admission, length=32_768, hit=False),
    "admit_32768_hit": partial(measure_admission, length=32_768, hit=True),
    "blocks_8_cold": partial(measure_blocks, num_blocks=8, evict=False),
    "blocks_128_cold": partial(measure_blocks, num_blocks=128, evict=False),
    "blocks_8_evict": partial(measure_blocks, num_blocks=8, evict=True),
    "blocks_128_evict": partial(measure_blocks, num_blocks=128, evict=True),
    **{f"submit_{n}": partial(measure_submit, length=n) for n in (2048, 32_768)},
    **{f"outputs_{b}": partial(measure_outputs, num_requests=b) for b in (256, 1024)},
    "core_256": measure_core,
    "client_256": measure_client,  # from here on as in a client process
    "both_core_cpu_256": lambda *settings: measure_both(*settings)["core"],
    "both_client_cpu_256": lambda *settings: measure_both(*settings)["client"],
}


def _mean_us(step: Callable[[], tuple[int, Any]], num_steps: int) -> float:
    """Mean of the nanoseconds that steps return; what else they return is dropped untimed."""
    return sum(step()[0] for _ in range(num_steps)) / 1e3 / num_steps


def _both_ways_us(encode: Callable[[], Any], decoder: MsgpackDecoder, repeats: int) -> list[float]:
    """Encoding plus decoding, each the mean over 40 ms of calls."""
    frames = [bytes(frame) for frame in encode()]
    _freeze_heap()
    figures = [0.0] * repeats
    for call in (encode, lambda: decoder.decode(frames)):
        num_calls = max(3, round(40_000 / _calls_us(call, 3)))
        _calls_us(call, num_calls)
        figures = [figure + _calls_us(call, num_calls) for figure in figures]
    return figures


def _calls_us(call: Callable[[], Any], num_calls: int) -> float:
    start_ns = _now_ns()
    for _ in range(num_calls):
        call()
    return (_now_ns() - start_ns) / 1e3 / num_calls


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
    """Nanoseconds in the scheduler, and the step's outputs."""
    start_ns = _now_ns()
    plan = scheduler.schedule()
    spent_ns = _now_ns() - start_ns
    sampled = sample(scheduler, plan)
    start_ns = _now_ns()
    outputs = scheduler.update_from_output(plan, sampled)
    spent_ns += _now_ns() - start_ns
    assert len(outputs[0].outputs) == len(scheduler.requests), "each request got its token"
    return spent_ns, outputs[0]


if __name__ == "__main__":
    main()
