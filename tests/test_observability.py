"""docs/observability.md against what is printed: lines of its example, names of numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.process.cache_size import CacheSize
from nanocore.engine_core.process.memory_table import memory_table
from nanocore.engine_core.scheduling.step_plan import Chunk
from nanocore.kv_cache import Capacity
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from nanocore.worker.dry_run import dry_run
from nanocore.worker.memory.kv_groups import CacheKind, KVGroup
from tests.docs.blocks import blocks
from tests.engine_core.log.clocked_engine import Engine
from tests.engine_core.log.test_utilisation import entries

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "observability.md").read_text("utf-8")
SPEED = MachineSpeed(bytes_per_s=3e10, flops_per_s=4e11)

COST = ModelCost(num_params=1, token_params=1, head_params=0, weight_bytes=1, attention=[])


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The lines of `--check` for the demo model, on a machine of some speed."""
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=2 * 10**9)
    folder = demo_model_folder()
    ranks = dry_run(config.worker_config(str(folder), 2048))
    size = CacheSize([KVGroup(CacheKind(), 4)], Capacity(32768, 16), 2048)
    return list(memory_table(config, ranks, size))


def example() -> list[str]:
    (text,) = [b.text for b in blocks("docs/observability.md") if b.text.startswith("memory\n")]
    return text.strip().split("\n")


def without_numbers(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d,.]*", "#", line)).strip()


def test_the_example_has_the_lines_that_are_printed(printed: list[str]) -> None:
    assert list(map(without_numbers, example())) == list(map(without_numbers, printed))


@pytest.mark.parametrize("name", ["weights", "KV cache", "activations", "tables"])
def test_the_example_has_the_demo_models_memory(name: str, printed: list[str]) -> None:
    (shown,) = [line for line in example() if line.startswith(f"  {name} ")]
    assert shown in printed


def test_the_log_has_lines_like_those_of_the_example() -> None:
    used = Utilisation(COST, SPEED)
    for chunks in 2 * ([], [Chunk(0, 5, 0)]):
        used.take(entries(0.01, [9], chunks))
    for line in used.summary():
        assert without_numbers(line) in map(without_numbers, DOCUMENT.splitlines())


def test_every_metric_that_is_explained_exists() -> None:
    section = DOCUMENT.split("\n## Metrics\n")[1].split("\n## ")[0]
    items = " ".join(line for line in section.splitlines() if line.startswith(("- ", "  ")))
    named = {word for word in re.findall(r"`(\w+)`", items) if "_" in word}
    known = Engine(Utilisation(COST, SPEED)).metrics().keys()
    assert named
    assert named <= known | {"engine_up"}
