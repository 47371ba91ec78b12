"""The engine on the GPU: first whether it is right, then how fast its steps are.

Each model's engine is in this process and ends before the next one starts.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import LocalEngine, common_settings
from benchmarks.gpu.engine_checks import check_against_transformers, check_paths
from benchmarks.gpu.engine_speed import decode_figures, idle_figures, prefill_figures
from benchmarks.gpu.session import TIME_LIMIT, Results, Session, say
from benchmarks.gpu.shapes import Model, models, rates
from nanocore.engine_core.process import process_age_s


def measure(session: Session) -> None:
    """Check, then time."""
    results = Results(session, "engine", needs_s=10.0)
    results.data["rates_measured"] = rates(session).measured
    with tempfile.TemporaryDirectory(prefix="nanocore-gpu-") as name:
        folder = Path(name)
        if session.wants("check/transformers"):
            check_against_transformers(session, results, folder)
        if session.wants("check/paths"):
            check_paths(session, results, folder)
        for model in models(session).values():
            if session.wants(f"speed/{model.name}"):
                _measure_speed(session, results, model, folder)
    results.finish()


def _measure_speed(session: Session, results: Results, model: Model, parent: Path) -> None:
    name = f"speed/{model.name}"
    if session.remaining_s < results.needs_s:
        results.skip(name, TIME_LIMIT)
        return
    settings = common_settings(session) | {"load_format": "dummy"}
    try:
        engine = LocalEngine(model.write_folder(parent), **settings)
    except Exception as error:  # the other model may still start
        results.fail(f"{name}/start", error)
        return
    start = {
        "phases_s": engine.phases_s,
        "process_age_s": round(process_age_s(), 2),
        "kernels": engine.kernels,
        "num_blocks": engine.num_blocks,
        "block_size": engine.block_size,
    }
    results.put(f"{name}/start", start)
    say(f"{name}: {start}")
    _measure_steps(session, results, model, engine)
    engine.close()
    del engine
    free_memory()


def _measure_steps(session: Session, results: Results, model: Model, engine: LocalEngine) -> None:
    name = f"speed/{model.name}"
    batches, contexts = ((1, 4), (16, 64)) if session.small else ((1, 32, 256), (128, 1024))

    def measure(case: str, figures: Callable[..., Any], *arguments: int) -> None:
        results.measure(f"{name}/{case}", figures, engine, model, *arguments, session)

    for context, batch in product(contexts, batches):
        measure(f"decode/b{batch}/ctx{context}", decode_figures, batch, context)
    for batch in batches:
        measure(f"idle/b{batch}", idle_figures, batch, contexts[-1])
    for length in (contexts[-1],) if session.small else (1024, 4096):
        measure(f"prefill/{length}", prefill_figures, length)


def free_memory() -> None:
    """What an engine had, back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
