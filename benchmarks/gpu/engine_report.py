"""The engine on the GPU: its speed with the smaller model, whether it is right, then a matrix.

Engines are in this process, one at a time; one is started when a measurement first asks for its
settings. The first one tells whether graphs can be recorded: where it does not start, those after
it do without graphs, so that the rest is measured.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.engine import LocalEngine, common_settings
from benchmarks.gpu.engine_checks import checks
from benchmarks.gpu.engine_speed import decode_figures, idle_figures, prefill_figures
from benchmarks.gpu.offline import offline_figures
from benchmarks.gpu.session import Results, Session, UnavailableError
from benchmarks.gpu.shapes import Model, models, rates
from nanocore.engine_core.process.process import process_age_s
from nanocore.protocol.errors import ConfigError

Measurements = dict[str, Callable[[], Any]]
Settings = dict[str, Any]
_VARIANTS: Final[dict[str, Settings]] = {
    "weights int8": {"quantization": "int8"},
    "kv int8": {"kv_cache_dtype": "int8"},
    "kv fp8": {"kv_cache_dtype": "fp8"},
    "weights fp8": {"quantization": "fp8"},
    "eager": {"enforce_eager": True},
}


def measure(session: Session) -> None:
    """The first model's speed, checks, and the matrix of models, weights and caches."""
    results = Results(session, "engine", needs_s=10.0, hangs_s=240.0)
    results.data["rates_measured"] = rates(session).measured
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as name:
        engines = Engines(session, Path(name))
        results.run(measurements(engines))
        engines.close()


def measurements(engines: Engines) -> Measurements:
    """All of them, by name and in their order."""
    session, parent = engines.session, engines.parent
    first, *others = models(session).values()
    plan = _speed(engines, first, "speed", {}, every_row=True)
    plan |= engines.aside(checks(session, parent))
    for model in others:
        plan |= _speed(engines, model, "matrix", {})
    for model in (first, *others):
        bench = {f"bench/{model.name}": partial(offline_figures, session, model, parent)}
        plan |= engines.aside(bench)
    for model in (first, *others):
        for variant, settings in _VARIANTS.items():
            plan |= _speed(engines, model, "matrix", settings, f"/{variant}")
    return plan


class Engines:
    """Engines by what they are started with, one at a time."""

    def __init__(self, session: Session, parent: Path) -> None:
        self.session, self.parent = session, parent
        self._engine: LocalEngine | None = None
        self._key = ""
        self._refusal: Exception | None = None

    def get(self, model: Model, settings: Settings) -> LocalEngine:
        """With these settings beside those of all.

        Raises:
            UnavailableError: there are no such engines here. StartError and others: as engines do.
        """
        settings = common_settings(self.session) | settings
        key = f"{model.name} {settings}"
        if key != self._key:
            self.close()
            self._key = key
            try:
                folder = model.write_folder(self.parent)
                self._engine = LocalEngine(folder, **settings)
            except ConfigError as refusal:
                self._refusal = UnavailableError(str(refusal))
            except Exception as refusal:  # for all that need this engine, without trying again
                self._refusal = RuntimeError(f"{type(refusal).__name__}: {refusal}")
                raise
        if self._engine is None:
            assert self._refusal is not None
            raise self._refusal
        return self._engine

    def close(self) -> None:
        """What there is, so that the device's memory is free."""
        engine, self._engine, self._key, self._refusal = self._engine, None, "", None
        if engine is not None:
            engine.close()
            del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def aside(self, measurements: Measurements) -> Measurements:
        """The same, with no engine of ours beside them."""

        def alone(measurement: Callable[[], Any]) -> Any:
            self.close()
            return measurement()

        return {name: partial(alone, found) for name, found in measurements.items()}

    def steps(
        self, figures: Callable[..., Any], model: Model, settings: Settings, *arguments: int
    ) -> Any:
        """Figures of an engine's steps; it is not used again if they fail."""
        engine = self.get(model, settings)
        try:
            return figures(engine, model, *arguments, self.session)
        except BaseException:
            del engine
            self.close()
            raise

    def start_figures(self, model: Model, settings: Settings) -> dict[str, Any]:
        """What the start took and found."""
        engine = self.get(model, settings)
        return {
            "phases_s": engine.phases_s,
            "process_age_s": round(process_age_s(), 2),
            "kernels": engine.kernels,
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "eager": engine.config.enforce_eager,
        }


def _speed(
    engines: Engines,
    model: Model,
    kind: str,
    settings: Settings,
    variant: str = "",
    every_row: bool = False,
) -> Measurements:
    """Start, decode steps, idle time and prompts of one engine."""
    small = engines.session.small
    name = f"{kind}/{model.name}{variant}"
    context, lengths = (64, (64,)) if small else (1024, (1024, 4096))
    batches = (32, 1, 256, 8, 128, 64, 48) if every_row else (32, 1, 256, 64)
    batches = (4, 1) if small else batches

    def steps(figures: Callable[..., Any], *arguments: int) -> Callable[[], Any]:
        return partial(engines.steps, figures, model, settings, *arguments)

    plan: Measurements = {f"{name}/start": partial(engines.start_figures, model, settings)}
    for batch in batches:
        plan[f"{name}/decode/b{batch}/ctx{context}"] = steps(decode_figures, batch, context)
    plan[f"{name}/idle/b{batches[0]}"] = steps(idle_figures, batches[0], context)
    for length in lengths if every_row else lengths[:1]:
        plan[f"{name}/prefill/{length}"] = steps(prefill_figures, length)
    return plan
