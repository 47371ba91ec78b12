"""Steps of an engine in this process: of decodes, of prompts, and how idle the GPU is in them.

One engine at a time, started when a measurement first asks for its settings. The first one tells
whether graphs can be recorded: where it does not start, those after it do without, so that the rest
is measured.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import LocalEngine, engine_settings
from benchmarks.gpu.fa3 import FOLDER_VARIABLE
from benchmarks.gpu.peers import STAND_INS
from benchmarks.gpu.results import (
    PDL_VARIABLE,
    Measurements,
    Results,
    Session,
    UnavailableError,
)
from benchmarks.gpu.shapes import Model, models, rates, weight_bytes
from benchmarks.gpu.timing import synchronize
from benchmarks.models import write_config
from benchmarks.report import spread
from nanocore.protocol.errors import ConfigError

_EXTRA_OUTPUTS: Final = 64
NO_PDL: Final = "no pdl"
_VARIANTS: Final[dict[str, dict[str, Any]]] = {
    NO_PDL: {NO_PDL: True},
    "kv fp8": {"kv_cache_dtype": "fp8"},
    "weights int8": {"quantization": "int8"},
    "weights int4": {"quantization": "int4"},
    "weights fp8": {"quantization": "fp8"},
    "kv int8": {"kv_cache_dtype": "int8"},
    "flash": {"attention_backend": "flash"},
}


def measure(results: Results, part: str) -> None:
    """`speed`: the smaller model. `large`: the larger one. `variants`: the smaller in each form."""
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as folder:
        engine = CurrentEngine(results, Path(folder))
        results.run(measurements(engine, part), needs_s=10, hangs_s=240)
        engine.close()


def measurements(engine: CurrentEngine, part: str) -> Measurements:
    """By name."""
    small, large = models(engine.results.session)
    if part == "large":
        return _speed(engine, large, part, {}, (32, 1, 256))
    if part == "speed":
        found = _speed(engine, small, part, {}, (32, 1, 256))
        # Profiles last: the profiler takes seconds to start, and slows down what comes after.
        found |= _profiles(engine, small, part, {}, (32, 1, 256))
        name = f"{part}/{small.name}/prompts"
        _, length = _sizes(engine.results.session, ())
        return found | {name: partial(engine.use, small, {}, _prompt_profile, length)}
    found = {}
    for variant, settings in _VARIANTS.items():
        found |= _speed(engine, small, part, settings, (32, 256), f"/{variant}", has_prompts=False)
        if "kv_cache_dtype" in settings:
            found |= _profiles(engine, small, part, settings, (32, 256), f"/{variant}")
    return found


def _speed(
    engine: CurrentEngine, model: Model, part: str, settings: dict[str, Any],
    batches: tuple[int, ...], variant: str = "", *, has_prompts: bool = True,
) -> Measurements:  # fmt: skip
    """Start, decode steps and prompts of one engine."""
    name, use = f"{part}/{model.name}{variant}", partial(engine.use, model, settings)
    batches, length = _sizes(engine.results.session, batches)
    found: Measurements = {f"{name}/start": partial(use, _start_figures)}
    for batch in batches:
        decode = partial(use, _decode_figures, batch, length)
        found[f"{name}/decode/b{batch}/ctx{length}"] = decode
    if has_prompts:
        found[f"{name}/prefill/{length}"] = partial(use, _prefill_figures, length)
    return found


def _profiles(
    engine: CurrentEngine, model: Model, part: str, settings: dict[str, Any],
    batches: tuple[int, ...], variant: str = "",
) -> Measurements:  # fmt: skip
    """What the device does in decode steps, and how idle it is."""
    name, use = f"{part}/{model.name}{variant}", partial(engine.use, model, settings)
    batches, length = _sizes(engine.results.session, batches)
    return {
        f"{name}/idle/b{batch}": partial(use, _idle_figures, batch, length) for batch in batches
    }


def _sizes(session: Session, batches: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Numbers of rows, and tokens of a context or prompt."""
    return ((4, 1), 64) if session.small else (batches, 1024)


class CurrentEngine:
    """An engine at a time, by what it is started with; one that failed is not used again."""

    def __init__(self, results: Results, folder: Path) -> None:
        self.results, self._folder = results, folder
        self._engine: LocalEngine | None = None
        self._key: tuple[str, str] | None = None
        self._pdl = os.environ.get(PDL_VARIABLE, "1")

    def use(self, model: Model, settings: dict[str, Any], figures: Any, *arguments: int) -> Any:
        """Figures of an engine with these settings.

        Raises:
            UnavailableError: there are no such engines here. StartError and others: as engines do.
        """
        key = model.name, str(settings)
        if key != self._key:
            self.close()
            self._key = key
            common = engine_settings(self.results) | {"load_format": "dummy"}
            folder = self._folder / model.name
            write_config(model.shape, folder)
            try:
                self._engine = LocalEngine(folder, **common | self._prepare(settings))
            except ConfigError as refusal:
                raise UnavailableError(str(refusal)) from refusal
        if self._engine is None:
            raise UnavailableError("its engine did not start, or failed")
        try:
            return figures(self._engine, model, self.results, *arguments)
        except BaseException:
            self._forget()
            raise

    def _prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Do what a variant asks of this process; returns the engine's settings of it."""
        session = self.results.session
        if session.on_gpu:
            from nanocore.kernels.triton import launch

            os.environ[PDL_VARIABLE] = "0" if NO_PDL in settings else self._pdl
            launch.pdl.cache_clear()
        elif NO_PDL in settings:
            raise UnavailableError("needs a GPU")
        if settings.get("attention_backend") == "flash":
            if session.carried is None:
                raise UnavailableError("not carried: FlashAttention 3")
            os.environ[FOLDER_VARIABLE] = str(session.carried)
            sys.path.insert(0, str(STAND_INS))
        return {name: value for name, value in settings.items() if name != NO_PDL}

    def close(self) -> None:
        """So that the device's memory is free."""
        self._forget()
        self._key = None

    def _forget(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _start_figures(engine: LocalEngine, _model: Model, _results: Results) -> dict[str, Any]:
    return {"phases_s": engine.phases_s, "kernels": engine.kernels,
            "num_blocks": engine.num_blocks, "eager": engine.config.enforce_eager}  # fmt: skip


def _decode_figures(
    engine: LocalEngine, model: Model, results: Results, batch: int, context: int
) -> dict[str, Any]:
    """Milliseconds of a step of `batch` rows of `context` tokens, and the share of its limit."""
    num_steps = 4 if results.session.small else 64
    _start_decoding(engine, model, batch, context, num_steps)
    step_ms = spread([1e3 * engine.step() for _ in range(num_steps)])
    engine.run()
    config = engine.config
    limit_ms = 1e3 * model.decode_step_s(
        batch, batch * (context + num_steps // 2), rates(results),
        weight_bytes=weight_bytes(config.quantization),
        kv_bytes=2 if config.kv_cache_dtype == "auto" else 1,
    )  # fmt: skip
    return _beside_limit(step_ms, batch, limit_ms)


def _prefill_figures(
    engine: LocalEngine, model: Model, results: Results, length: int
) -> dict[str, Any]:
    """Prompt tokens per second of steps that are full of prompts of this length."""
    session, times_ms = results.session, []
    num_prompts, length = _full_step(engine, length)
    for repetition in range(3 if session.small else 6):
        for prompt in _prompts(model, num_prompts, length, repetition):
            engine.add(prompt, 1)
        synchronize(session.device)
        start_s = time.perf_counter()
        engine.run()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    step_ms = spread(times_ms[1:])
    limit_ms = 1e3 * model.prefill_s([length] * num_prompts, rates(results))
    return _beside_limit(step_ms, num_prompts * length, limit_ms)


def _beside_limit(step_ms: dict[str, Any], num_tokens: int, limit_ms: float) -> dict[str, Any]:
    return {"step_ms": step_ms, "tokens_per_s": round(1e3 * num_tokens / step_ms["median"], 1),
            "limit_ms": limit_ms, "share_of_limit": limit_ms / step_ms["median"]}  # fmt: skip


def _idle_figures(
    engine: LocalEngine, model: Model, results: Results, batch: int, context: int
) -> dict[str, Any]:
    """Milliseconds of a decode step in which the device has nothing to do.

    What the device was busy with is from a profile, which slows the host down; the step's own time
    is from steps without one.
    """
    num_steps = 3 if results.session.small else 24
    _start_decoding(engine, model, batch, context, 2 * num_steps)
    step_ms = spread([1e3 * engine.step() for _ in range(num_steps)])

    def steps() -> None:
        for _ in range(num_steps):
            engine.step()

    busy = _profile(results.session, steps, num_steps)
    engine.run()
    idle_ms = round(step_ms["median"] - busy["device_busy_ms"], 4)
    return {"step_ms": step_ms, "idle_ms": idle_ms, **busy}


def _prompt_profile(
    engine: LocalEngine, model: Model, results: Results, length: int
) -> dict[str, Any]:
    """What the device is busy with in a step that is full of prompts."""
    num_prompts, length = _full_step(engine, length)
    for prompt in _prompts(model, num_prompts, length, -1):
        engine.add(prompt, 1)
    return _profile(results.session, engine.run, 1)


def _profile(session: Session, work: Callable[[], None], num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step in which the device is busy, and what takes the most of them."""
    on_device = [ProfilerActivity.CUDA] if session.on_gpu else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as profiled:
        work()
        synchronize(session.device)
    pieces = [
        (event.time_range.start, event.time_range.end, event.name[:60])
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    busy_us, by_name = device_work(pieces)
    return {
        "device_busy_ms": round(busy_us / 1e3 / num_steps, 4),
        "device_pieces_per_step": round(len(pieces) / num_steps, 1),
        "most_time_us": {name: round(us / num_steps, 1) for name, us in by_name.items()},
    }


def device_work(work: list[tuple[float, float, str]]) -> tuple[float, dict[str, float]]:
    """Time in which pieces (start, end, name) kept the device busy, and that of the longest."""
    busy, last = 0.0, float("-inf")
    by_name: dict[str, float] = {}
    for start, end, name in sorted(work):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
        by_name[name] = by_name.get(name, 0.0) + end - start
    return busy, dict(sorted(by_name.items(), key=lambda item: -item[1])[:12])


def _start_decoding(
    engine: LocalEngine, model: Model, batch: int, context: int, num_steps: int
) -> None:
    """Step until rows of so much context decode, and a few steps more; num_steps can follow.

    The first rows decode while the last ones' prompts are computed.
    """
    num_outputs = num_steps + _EXTRA_OUTPUTS
    context = min(context, engine.scheduler.config.max_model_len - num_outputs)
    handles = [engine.add(p, num_outputs) for p in _prompts(model, batch, context, batch)]
    while not all(engine.tokens[handle] for handle in handles):
        engine.step()
    for _ in range(3):
        engine.step()


def _full_step(engine: LocalEngine, length: int) -> tuple[int, int]:
    """Number of prompts that fill a step, and their length, which leaves room for a token."""
    sizes = engine.config.sizes
    num_prompts = max(1, min(sizes.max_num_batched_tokens // length, sizes.max_num_seqs))
    return num_prompts, min(length, engine.scheduler.config.max_model_len - 1)


def _prompts(model: Model, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(model.shape.vocab_size), k=length) for _ in range(count)]
