"""Memory of an engine: worked numbers, and the shape of what is printed; the machine's speed."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process import process as process_module
from nanocore.engine_core.process.cache_size import CacheSize, cache_groups
from nanocore.engine_core.process.check import check_engine
from nanocore.engine_core.process.memory_table import memory_summary, memory_table
from nanocore.kv_cache import Capacity
from nanocore.protocol.errors import ConfigError
from nanocore.worker import devices
from nanocore.worker.cost.model_cost import AttentionCost, MachineSpeed, ModelCost
from nanocore.worker.memory.kv_groups import CacheKind, KVGroup, LayerGroup
from nanocore.worker.rank_messages import WorkerInfo

COST = ModelCost(
    num_params=2_000_000,
    token_params=1_500_000,
    head_params=500_000,
    weight_bytes=4_000_000,
    attention=[AttentionCost(window=0, kv_bytes=1000, pair_flops=2000)],
)
SPEED = MachineSpeed(bytes_per_s=1e9, flops_per_s=1e11)
RANK = WorkerInfo(
    device="cpu",
    dtype="bfloat16",
    kernels="cpu",
    weight_bytes=4_000_000,
    kv_groups=[LayerGroup(CacheKind(), 1, 16_000)],
    available_kv_bytes=10**9,
    memory_bytes=2 * 10**9,
    activation_bytes=50_000_000,
    table_bytes=7_000_000,
    cost=COST,
)


def test_groups_of_layers_are_shown_with_what_the_longest_request_holds_of_each() -> None:
    own = [LayerGroup(CacheKind(), 2, 64_000), LayerGroup(CacheKind(window=33), 10, 320_000)]
    rank = replace(RANK, kv_groups=own)
    groups = [KVGroup(CacheKind(), 2, 5), KVGroup(CacheKind(window=33), 10, 1)]
    held = cache_groups(groups, 16)
    size = CacheSize(groups, Capacity(1000, 16, held, 128), 4096)
    config = EngineConfig(max_num_seqs=64)
    lines = list(memory_table(config, [rank], size))
    assert size.rank_bytes(rank) == 1000 * 320_000
    assert "  KV cache          320.0 MB  24,000 bytes per token, if all layers keep it" in lines
    # 52 and 11 slabs of one; each of the others has 51.2 and 4 when its prompt is computed.
    num_requests = 1 + int((1000 - 63) / 55.2)
    assert lines[-1] == f"room for {num_requests} requests of 4,096 tokens at once"
    assert "   full              16.4 MB  2 layers, 256 blocks in the longest request" in lines
    assert "   window(33)         3.5 MB  10 layers, 11 blocks in the longest request" in lines


def sized(num_blocks: int, max_model_len: int) -> CacheSize:
    return CacheSize([KVGroup(CacheKind(), 1)], Capacity(num_blocks, 16), max_model_len)


def make(ranks: int = 1, num_blocks: int = 1000, max_model_len: int = 5000) -> list[str]:
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, tensor_parallel_size=ranks)
    return list(memory_table(config, [RANK] * ranks, sized(num_blocks, max_model_len)))


def test_memory_is_told_by_what_takes_it() -> None:
    lines = make()
    assert "  KV cache           16.0 MB  1,000 bytes per token, 1,000 blocks of 16 tokens" in lines
    left = 2000 - 16 - 50 - 7
    assert f"  left            {left:,}.0 MB  of available memory" in lines
    assert any("2,000 bytes per token" in line for line in make(ranks=2))


def test_as_many_run_at_once_as_there_are_blocks_and_rows_for() -> None:
    assert make()[-1] == f"room for {1000 // 313} requests of 5,000 tokens at once"
    assert make(num_blocks=10**6)[-1] == "room for 64 requests of 5,000 tokens at once"


def test_the_table_is_narrow_and_has_a_line_for_everything() -> None:
    lines = make(ranks=2)
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    names = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert names == ["weights", "KV", "activations", "tables", "process", "grammars", "left"]
    assert lines[0] == "memory, the most of 2 ranks"
    assert lines[-1] == "room for 3 requests of 5,000 tokens at once"


def test_the_log_speaks_of_each_ranks_memory() -> None:
    line = memory_summary(EngineConfig(), [RANK], sized(1000, 5000))
    assert line == (
        "memory weights 4.0 MB, KV cache 16.0 MB, activations 50.0 MB, tables 7.0 MB; "
        "1,000 bytes of KV a token"
    )


def test_suffixes_take_memory_and_other_proposers_none() -> None:
    size = sized(1000, 5000)
    suffix, ngram = (
        EngineConfig(speculative_config={"method": method}) for method in ("suffix", "ngram")
    )
    lines = memory_table(suffix, [RANK], size)
    (row,) = [line for line in lines if line.startswith("  drafts ")]
    assert row == "  drafts            268.4 MB  suffixes of texts, at most"
    assert "tables 7.0 MB, drafts at most 268.4 MB; " in memory_summary(suffix, [RANK], size)
    assert not any("drafts" in line for line in memory_table(ngram, [RANK], size))
    assert "drafts" not in memory_summary(ngram, [RANK], size)


def test_a_check_refuses_drafts_that_no_start_could_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_library", lambda: None)
    config = EngineConfig(device="cpu", speculative_config={"method": "suffix"})
    with pytest.raises(ConfigError, match=r"--speculative-config: .* without its compiled kernels"):
        check_engine(config)


def test_all_cores_of_a_cpu_are_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def measure(*arguments: object, room_bytes: int) -> MachineSpeed:
        asked.append((*arguments, room_bytes))
        return SPEED

    monkeypatch.setattr(process_module, "measure_speed", measure)
    utilisation, [later] = process_module._machine_use([RANK, RANK])
    assert utilisation.speed is None
    later()
    assert utilisation.speed == SPEED
    assert asked == [(torch.device("cpu"), torch.bfloat16, 2 * 10**9 // 8)]


def test_what_ranks_have_measured_is_not_measured_again() -> None:
    utilisation, later = process_module._machine_use([replace(RANK, speed=SPEED)] * 2)
    assert utilisation.speed == MachineSpeed.joined([SPEED] * 2)
    assert later == []
