"""Steps of an engine in this process: of decodes, of prompts, and how idle the GPU is in them."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.engine import Generated, LocalEngine
from benchmarks.gpu.session import Session
from benchmarks.gpu.shapes import Model, rates
from benchmarks.gpu.timing import synchronize
from benchmarks.machine import spread

_EXTRA_OUTPUTS: Final = 64
_DEVICE_WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")


def decode_figures(
    engine: LocalEngine, model: Model, batch: int, context: int, session: Session
) -> dict[str, Any]:
    """Milliseconds of a step of `batch` rows of `context` tokens, and the share of its limit."""
    num_steps = 4 if session.small else 64
    generated = start_decoding(engine, model, batch, context, num_steps)
    times_s = [engine.step(generated) for _ in range(num_steps)]
    engine.run()
    step_ms = spread([round(1e3 * t, 4) for t in times_s])
    middle = context + num_steps // 2
    config = engine.config
    limit_ms = 1e3 * model.decode_step_s(
        batch, batch * middle, rates(session),
        weight_bytes=1 if config.quantization else 2,
        kv_bytes=2 if config.kv_cache_dtype == "auto" else 1,
    )  # fmt: skip
    return {
        "step_ms": step_ms,
        "tokens_per_s": round(1e3 * batch / step_ms["median"], 1),
        "limit_ms": round(limit_ms, 4),
        "share_of_limit": round(limit_ms / step_ms["median"], 4),
    }


def prefill_figures(
    engine: LocalEngine, model: Model, length: int, session: Session
) -> dict[str, Any]:
    """Prompt tokens per second of steps that are full of prompts of this length."""
    budget = engine.config.sizes.max_num_batched_tokens
    num_prompts = max(1, min(budget // length, engine.config.sizes.max_num_seqs))
    num_rounds = 2 if session.small else 5
    times_s = []
    length = min(length, engine.scheduler.config.max_model_len - 1)
    for repetition in range(num_rounds + 1):
        for prompt in _prompts(model, num_prompts, length, repetition):
            engine.add(prompt, 1)
        synchronize(session.device)
        start_s = time.perf_counter()
        engine.run()
        times_s.append(time.perf_counter() - start_s)
    del times_s[0]
    limit_s = model.prefill_s([length] * num_prompts, rates(session))
    step_ms = spread([round(1e3 * t, 3) for t in times_s])
    return {
        "step_ms": step_ms,
        "tokens_per_s": round(1e3 * num_prompts * length / step_ms["median"], 1),
        "num_prompts": num_prompts,
        "limit_ms": round(1e3 * limit_s, 4),
        "share_of_limit": round(1e3 * limit_s / step_ms["median"], 4),
    }


def idle_figures(
    engine: LocalEngine, model: Model, batch: int, context: int, session: Session
) -> dict[str, Any]:
    """Milliseconds of a decode step in which the device has nothing to do.

    What the device was busy with is from a profile, which slows the host down; the step's own time
    is from steps without one.
    """
    num_steps = 3 if session.small else 24
    generated = start_decoding(engine, model, batch, context, 2 * num_steps)
    plain_s = [engine.step(generated) for _ in range(num_steps)]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            engine.step(generated)
        synchronize(session.device)
    engine.run()
    busy_s, num_pieces, names = device_work(profile)
    step_ms = spread([round(1e3 * t, 4) for t in plain_s])
    busy_ms = 1e3 * busy_s / num_steps
    return {
        "step_ms": step_ms,
        "device_busy_ms": round(busy_ms, 4),
        "idle_ms": round(step_ms["median"] - busy_ms, 4),
        "device_pieces_per_step": round(num_pieces / num_steps, 1),
        "most_time_ms": {name: round(1e3 * s / num_steps, 4) for name, s in names},
    }


def device_work(profile: Any) -> tuple[float, int, list[tuple[str, float]]]:
    """(seconds in which the device was busy, pieces of work, the longest kinds of it)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in _DEVICE_WORK and "dur" in event
    )
    busy_us, end_us = 0.0, float("-inf")
    by_name: dict[str, float] = {}
    for start, end, name in work:
        busy_us += max(0.0, end - max(start, end_us))
        end_us = max(end_us, end)
        by_name[name[:60]] = by_name.get(name[:60], 0.0) + (end - start) / 1e6
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return busy_us / 1e6, len(work), longest


def start_decoding(
    engine: LocalEngine, model: Model, batch: int, context: int, num_steps: int
) -> Generated:
    """Step until rows of so much context decode, and a few steps more; num_steps can follow.

    The first rows decode while the last ones' prompts are computed.
    """
    num_outputs = num_steps + _EXTRA_OUTPUTS
    longest = engine.scheduler.config.max_model_len
    context = min(context, longest - num_outputs)
    generated = Generated()
    for prompt in _prompts(model, batch, context, batch):
        engine.add(prompt, num_outputs)
    while len(generated.tokens) < batch:
        engine.step(generated)
    for _ in range(3):
        engine.step(generated)
    return generated


def _prompts(model: Model, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(model.shape.vocab_size), k=length) for _ in range(count)]
