"""What an engine logs while it starts: what it is, and a line with the seconds of each phase."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanocore import __version__
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import memory_errors
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.rank_messages import WorkerInfo

logger = logging.getLogger(__name__)


def process_age_s() -> float:
    """Seconds since this process began, the interpreter's own start included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after boot; field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def log_beginning(config: EngineConfig, folder: Path, model: ModelConfig, imports_s: float) -> None:
    """What is started, of which model, and where."""
    name = f"model {folder} ({model.architecture})"
    where = f"{_describe_ranks(config)} | endpoint {config.endpoint}"
    logger.info("nanocore %s | %s | %s", __version__, name, where)
    logger.info("imports %.2f s, since the process began", imports_s)


@contextmanager
def phase(name: str) -> Iterator[list[str]]:
    """Log a start-up phase with its seconds and what it notes."""
    notes: list[str] = []
    start_s = time.monotonic()
    with memory_errors(f"{name}: "):
        yield notes
    logger.info("%s %.2f s: %s", name, time.monotonic() - start_s, ", ".join(notes))


def describe_workers(ranks: list[WorkerInfo]) -> str:
    """Where and how the ranks compute."""
    devices = ", ".join(dict.fromkeys(rank.device for rank in ranks))
    of_kernels = f" ({ranks[0].kernel_variant})" if ranks[0].kernel_variant else ""
    return f"device {devices}, dtype {ranks[0].dtype}, kernels {ranks[0].kernels}{of_kernels}"


def log_generation_defaults(model: ModelConfig) -> None:
    """What generation_config.json gives to requests, and what of it is not honoured."""
    defaults = model.generation
    if defaults.given:
        given = ", ".join(f"{name} {value}" for name, value in defaults.given.items())
        logger.info("generation_config.json: %s for requests without sampling parameters", given)
    if defaults.ignored:
        logger.info("generation_config.json: not honoured: %s", ", ".join(defaults.ignored))


def _describe_ranks(config: EngineConfig) -> str:
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    if tp_size * pp_size == 1:
        return "one rank, in this process"
    return f"{tp_size * pp_size} ranks (tensor parallel {tp_size}, pipeline parallel {pp_size})"
