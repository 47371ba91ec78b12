"""Ideal times and memory of an engine: worked numbers, and the shape of what is printed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.drafting.suffix import DEFAULT_MAX_BYTES
from nanocore.engine_core.process import forecast as forecast_module
from nanocore.engine_core.process.cache_size import CacheSize, cache_groups
from nanocore.engine_core.process.check import check_engine
from nanocore.engine_core.process.forecast import (
    Forecast,
    Roofline,
    forecast,
    known_speeds,
    machine_speeds,
    memory_summary,
    speed_summary,
    table,
)
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
    found = forecast(config, "folder", "Model", [rank], size, [SPEED])
    assert [msgspec.structs.astuple(one) for one in found.groups] == [
        ("full", 2, 64_000, 256), ("window(33)", 10, 320_000, 11),
    ]  # fmt: skip
    assert found.ranks[0].kv_cache_bytes == 1000 * 320_000
    # 52 and 11 slabs of one; each of the others has 51.2 and 4 when its prompt is computed.
    assert found.contexts[-1].num_requests == 1 + int((1000 - 63) / 55.2)
    lines = table(found).splitlines()
    assert "   full              16.4 MB  2 layers, 256 blocks in the longest request" in lines
    assert "   window(33)         3.5 MB  10 layers, 11 blocks in the longest request" in lines


def sized(num_blocks: int, max_model_len: int) -> CacheSize:
    return CacheSize([KVGroup(CacheKind(), 1)], Capacity(num_blocks, 16), max_model_len)


def make(ranks: int = 1, num_blocks: int = 1000, max_model_len: int = 5000) -> Forecast:
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, tensor_parallel_size=ranks)
    size = sized(num_blocks, max_model_len)
    return forecast(config, "model", "Arch", [RANK] * ranks, size, [SPEED] * ranks)


def test_memory_is_told_by_what_takes_it() -> None:
    (memory,) = make().ranks
    assert memory.kv_cache_bytes == 16_000_000
    assert memory.left_bytes == 2_000_000_000 - 16_000_000 - 50_000_000 - 7_000_000
    assert make().kv_token_bytes == 1000
    assert make(ranks=2).kv_token_bytes == 2000


def test_as_many_run_at_once_as_there_are_blocks_and_rows_for() -> None:
    found = [(one.context_tokens, one.num_requests) for one in make().contexts]
    assert found == [(1024, 1000 // 64), (4096, 1000 // 256), (5000, 1000 // 313)]
    assert [one.num_requests for one in make(num_blocks=10**6).contexts] == [64, 64, 64]
    assert [one.context_tokens for one in make(max_model_len=100).contexts] == [100]


def test_a_token_takes_the_reading_of_weights_and_context() -> None:
    first = make().contexts[0]
    assert first.decode_s == pytest.approx((4_000_000 + 1024 * 1000) / 1e9)
    assert first.full_decode_s == pytest.approx((4_000_000 + 15 * 1024 * 1000) / 1e9)


def test_a_prompt_takes_its_operations_in_chunks_of_the_budget() -> None:
    pairs = 5000 * 5001 / 2
    flops = 5000 * 3e6 + pairs * 2000 + 1e6
    assert make().contexts[-1].prefill_s == pytest.approx(flops / 1e11)
    # In chunks of 100 each waits for the weights: 4 MB and the context before it.
    slow = Roofline([COST], [MachineSpeed(bytes_per_s=1e9, flops_per_s=1e30)])
    assert slow.prefill_s(250, 100) == pytest.approx((3 * 4_000_000 + 550 * 1000) / 1e9)


def test_ranks_of_a_stage_work_at_once_and_stages_in_turn() -> None:
    slow = MachineSpeed(bytes_per_s=5e8, flops_per_s=1e11)
    alone = Roofline([COST], [SPEED]).decode_s(1, 10)
    assert Roofline([COST] * 2, [SPEED, slow], tp_size=2).decode_s(1, 10) == 2 * alone
    assert Roofline([COST] * 2, [SPEED, slow], tp_size=1).decode_s(1, 10) == 3 * alone


def test_the_table_is_narrow_and_has_a_line_for_everything() -> None:
    lines = table(make(ranks=2)).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    names = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    rows = ["weights", "KV", "activations", "tables", "process", "grammars", "left", "reads"]
    assert names[:8] == rows
    assert lines[0] == "memory, the most of 2 ranks"
    assert (
        len([line for line in lines if line.strip().startswith(("1,024", "4,096", "5,000"))]) == 3
    )


def test_long_times_stay_in_their_columns() -> None:
    slow = MachineSpeed(bytes_per_s=1e7, flops_per_s=1e10)
    config = EngineConfig(max_num_seqs=64)
    found = forecast(config, "model", "Arch", [RANK], sized(10**6, 131072), [slow])
    *_, last = table(found).splitlines()
    assert len(last.split()) == 8
    assert len(last) <= 80


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
    found = forecast(suffix, "model", "Arch", [RANK], size, [SPEED])
    assert found.draft_bytes == DEFAULT_MAX_BYTES
    (row,) = [line for line in table(found).splitlines() if line.startswith("  drafts ")]
    assert row == "  drafts            268.4 MB  suffixes of texts, at most"
    assert "tables 7.0 MB, drafts at most 268.4 MB; " in memory_summary(suffix, [RANK], size)
    other = forecast(ngram, "model", "Arch", [RANK], size, [SPEED])
    assert (other.draft_bytes, "drafts" in table(other)) == (0, False)
    assert "drafts" not in memory_summary(ngram, [RANK], size)


def test_a_check_refuses_drafts_that_no_start_could_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_library", lambda: None)
    config = EngineConfig(device="cpu", speculative_config={"method": "suffix"})
    with pytest.raises(ConfigError, match=r"--speculative-config: .* without its compiled kernels"):
        check_engine(config)


def test_the_log_speaks_of_the_longest_request() -> None:
    assert speed_summary(make()) == (
        "at best 9.00 ms a token and 400 ms a prompt at 5000 tokens, alone: 1.0 GB/s "
        "and 0.10 TFLOP/s were measured"
    )


def test_a_bound_measured_on_a_busy_machine_is_none() -> None:
    busy = replace(SPEED, is_quiet=False)
    assert not busy.shared(2).is_quiet
    assert not MachineSpeed.joined([SPEED, busy]).is_quiet
    found = replace(make(), speed=busy)
    speed = speed_summary(found)
    assert speed.startswith("about 9.00 ms a token")
    assert speed.endswith("measured, while other programs used the machine: it has more to give")
    assert "while other programs used it: it has more to give: cpu" in table(found)


WHOLE = MachineSpeed(bytes_per_s=8e9, flops_per_s=4e11, near_bytes=1000, near_bytes_per_s=1e11)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[tuple[object, ...]] = []

    def measure(*arguments: object) -> MachineSpeed:
        asked.append(arguments)
        return WHOLE

    monkeypatch.setattr(forecast_module, "measure_speed", measure)
    return asked


def test_ranks_on_a_cpu_share_what_all_its_cores_do(asked: list[tuple[object, ...]]) -> None:
    speeds = machine_speeds([RANK, RANK], stretch_s=0.5)
    assert asked == [(torch.device("cpu"), torch.bfloat16, 2 * 4_000_000, 0.5, 2 * 10**9 // 8)]
    assert speeds == [WHOLE.shared(2)] * 2
    assert MachineSpeed.joined(speeds) == WHOLE


def test_what_a_cpu_gave_is_known_to_later_starts_of_a_model_that_reads_as_much(
    asked: list[tuple[object, ...]],
) -> None:
    assert known_speeds([RANK]) is None
    machine_speeds([RANK], stretch_s=0.5)
    assert known_speeds([RANK]) == [WHOLE]
    assert known_speeds([replace(RANK, dtype="float32")]) is None
    assert known_speeds([RANK, RANK]) is None
    assert known_speeds([replace(RANK, speed=SPEED)]) == [SPEED], "a GPU's rank has measured it"
    assert len(asked) == 1


def test_what_a_busy_cpu_gave_is_not_kept(
    asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = replace(WHOLE, is_quiet=False)
    monkeypatch.setattr(forecast_module, "measure_speed", lambda *_: busy)
    assert machine_speeds([RANK], stretch_s=0.5) == [busy]
    assert known_speeds([RANK]) is None


def test_gpus_of_a_dry_run_are_as_the_first_one(asked: list[tuple[object, ...]]) -> None:
    rank = replace(RANK, device="cuda:0")
    assert machine_speeds([rank, rank], stretch_s=0.5) == [WHOLE, WHOLE]
    assert asked == [(torch.device("cuda:0"), torch.bfloat16, 4_000_000, 0.5)]


def test_what_ranks_have_measured_is_not_measured_again(asked: list[tuple[object, ...]]) -> None:
    assert machine_speeds([replace(RANK, speed=SPEED)] * 2) == [SPEED] * 2
    assert asked == []
