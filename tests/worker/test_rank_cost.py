"""What a rank's part of a model costs, counted by hand, and the work of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode

from nanocore.demo_model import demo_model_folder
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch import linear as torch_linear
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.cost.model_cost import AttentionCost, ModelCost
from nanocore.worker.cost.rank_cost import rank_cost, table_bytes
from nanocore.worker.dry_run import dry_run
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import WorkerConfig
from tests.engine_core.log.test_utilisation import COST
from tests.model_families import BUILDERS, reference_model
from tests.worker.configs import make_worker_config
from tests.worker.running import make_runner, run_runner, write_script

CPU = torch.device("cpu")
DEMO_MODEL = demo_model_folder()


def config_of(folder: Path, **changes: Any) -> WorkerConfig:
    return make_worker_config(folder=str(folder), max_model_len=64, **changes)


def cost_of(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> ModelCost:
    config = config_of(folder, **changes)
    outline = build_model(load_model_config(folder), Placement(dtype, CPU).on_meta())
    kv_format = kv_cache_format(config.kv_cache_dtype, dtype)
    layout = KVLayout(outline.cache_specs, kv_format, config.block_size)
    return rank_cost(outline, layout, config, TorchKernels())


def test_the_demo_model_by_hand() -> None:
    """192 wide, 5 layers, 4 heads and 2 KV heads of 64, MLPs of 512, 1,030 tokens, head tied."""
    layer = (4 + 2 + 2) * 64 * 192 + 4 * 64 * 192 + 3 * 512 * 192
    norms = 5 * (2 * 192 + 2 * 64) + 192
    assert cost_of(DEMO_MODEL, torch.bfloat16) == ModelCost(
        num_params=5 * layer + norms + 1030 * 192,
        token_params=5 * layer,
        head_params=1030 * 192,
        weight_bytes=2 * (5 * layer + norms + 1030 * 192),
        attention=[AttentionCost(window=0, kv_bytes=5 * 2 * 2 * 64 * 2, pair_flops=5 * 4 * 4 * 64)],
    )


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "lfm2_moe", "gemma2", "gpt2", "phi3"]
)
def test_torch_counts_as_many_operations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_linear, "_can_be_grouped", lambda *_: False)
    folder = BUILDERS[name](tmp_path)
    num_prompt, num_output = 20, 3
    script = write_script([list(range(5, 5 + num_prompt))], [[7] * num_output])
    runner = make_runner(folder, Placement(torch.float32, CPU), kernels=TorchKernels())
    with FlopCounterMode(display=False) as counter:
        run_runner(runner, script)
    counts = counter.get_flop_counts()["Global"]
    linear = sum(
        num_flops
        for operation, num_flops in counts.items()
        if str(operation) in ("aten.mm", "aten.addmm")
    )
    cost = cost_of(folder)
    num_tokens = num_prompt + num_output - 1
    assert linear == num_tokens * cost.token_flops + num_output * 2 * cost.head_params


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "mixtral", "gemma2", "gpt2", "phi3"])
def test_parameters_are_as_many_as_transformers_has(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    assert cost_of(folder).num_params == reference_model(folder).num_parameters()


def test_layers_with_a_window_are_counted_apart(tmp_path: Path) -> None:
    folder = BUILDERS["gemma2"](tmp_path)
    model = load_model_config(folder)
    sliding, full = (
        sum(kind == name for kind in model.attention.layer_types)
        for name in ("sliding_attention", "full_attention")
    )
    assert min(sliding, full) > 0
    token_bytes = 2 * model.attention.num_kv_heads * model.attention.head_dim * 4
    flops = 4 * model.attention.num_heads * model.attention.head_dim
    assert cost_of(folder).attention == [
        AttentionCost(window=0, kv_bytes=full * token_bytes, pair_flops=full * flops),
        AttentionCost(
            window=model.attention.sliding_window,
            kv_bytes=sliding * token_bytes,
            pair_flops=sliding * flops,
        ),
    ]


def test_experts_are_read_as_they_are_chosen_and_the_embedding_is_not(tmp_path: Path) -> None:
    folder = BUILDERS["qwen3_moe"](tmp_path)
    model = load_model_config(folder)
    cost = cost_of(folder)
    moe = model.moe
    assert moe is not None
    assert not model.tie_word_embeddings
    expert = 3 * moe.inner_size * model.hidden_size
    assert cost.expert_params == len(moe.sparse_layers) * moe.num_experts * expert
    assert cost.expert_bytes == 4 * cost.expert_params
    assert cost.lookup_bytes == 4 * model.vocab_size * model.hidden_size
    assert cost.held_bytes == 4 * cost.num_params
    idle = len(moe.sparse_layers) * (moe.num_experts - moe.num_experts_per_tok) * expert
    assert cost.active_params == cost.num_params - idle


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_tables_are_as_large_as_they_are_made(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    config = config_of(folder)
    model = build_model(load_model_config(folder), Placement(torch.float32, CPU))
    made = list(model.rotary_tables(64).values())
    rotary_bytes = sum(table.cos.nbytes + table.sin.nbytes for table in made)
    token_bytes, num_blocks = 2 * 4 * config.max_num_seqs * 65, config.max_num_seqs * 4
    assert table_bytes(model, config) == token_bytes + 4 * num_blocks + rotary_bytes


def test_quantized_weights_and_kv_are_read_as_they_are_kept() -> None:
    plain = cost_of(DEMO_MODEL, torch.bfloat16)
    int8 = cost_of(DEMO_MODEL, torch.bfloat16, quantization="int8", kv_cache_dtype="int8")
    assert plain.weight_bytes / 2 < int8.weight_bytes < 0.55 * plain.weight_bytes
    assert int8.token_flops == plain.token_flops
    # Of 64 values of 2 bytes there are 64 of one, and a scale of 2.
    assert int8.attention[0].kv_bytes / plain.attention[0].kv_bytes == 66 / 128


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_have_the_whole_model_between_them(tp_size: int, pp_size: int) -> None:
    split = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    ranks = dry_run(config_of(DEMO_MODEL, load_format="auto", **split))
    whole = cost_of(DEMO_MODEL, torch.bfloat16)
    joined = ModelCost.joined([rank.cost for rank in ranks if rank.cost is not None])
    for field in ("num_params", "token_params", "head_params", "attention"):
        assert getattr(joined, field) == getattr(whole, field)
    assert [rank.cost.held_bytes for rank in ranks if rank.cost] == [r.weight_bytes for r in ranks]


FULL = AttentionCost(window=0, kv_bytes=40, pair_flops=100)
SLIDING = AttentionCost(window=8, kv_bytes=10, pair_flops=20)


def dense(*attention: AttentionCost) -> ModelCost:
    return ModelCost(
        num_params=1300,
        token_params=1000,
        head_params=200,
        weight_bytes=2400,
        attention=list(attention),
    )


def seen_one_by_one(window: int, count: int, num_tokens: int) -> list[int]:
    positions = range(num_tokens - count, num_tokens)
    return [len(range(max(0, p - window + 1) if window else 0, p + 1)) for p in positions]


@pytest.mark.parametrize("window", [0, 1, 5, 8, 30])
@pytest.mark.parametrize(("count", "num_tokens"), [(1, 1), (1, 9), (9, 9), (4, 7), (5, 23)])
def test_pairs_and_what_is_read_are_those_of_each_token(
    window: int, count: int, num_tokens: int
) -> None:
    kind = AttentionCost(window=window, kv_bytes=1, pair_flops=1)
    sees = seen_one_by_one(window, count, num_tokens)
    assert kind.pairs(num_tokens, count) == sum(sees)
    first = num_tokens - count + 1 - sees[0]  # of those that the first one sees, and all behind it
    assert kind.seen(num_tokens, count) == num_tokens - first


def test_columns_are_as_their_numbers() -> None:
    ends, counts = np.array([1, 8, 9, 100]), np.array([1, 3, 9, 40])
    for kind in (FULL, SLIDING):
        pairs = zip(ends.tolist(), counts.tolist(), strict=True)
        assert kind.seen(ends, counts).tolist() == [kind.seen(*pair) for pair in pairs]
        pairs = zip(ends.tolist(), counts.tolist(), strict=True)
        assert kind.pairs(ends, counts).tolist() == [kind.pairs(*pair) for pair in pairs]


def test_of_experts_a_step_reads_as_many_as_its_tokens_choose() -> None:
    cost = replace(COST, attention=[])
    assert cost.active_params == 10_000 - 8000 * 6 // 8
    assert cost.read_weight_bytes(1) == 2400 + 16_000 * 2 / 8
    assert cost.read_weight_bytes(2) == 2400 + 16_000 * (1 - (6 / 8) ** 2)
    assert cost.read_weight_bytes(1000) == pytest.approx(2400 + 16_000)
    assert cost.token_flops == 2 * (1000 + 2000)


def test_ranks_together_read_and_compute_what_each_does() -> None:
    one, other = dense(FULL, SLIDING), dense(SLIDING)
    whole = ModelCost.joined([one, other])
    assert whole.num_params == 1300
    assert whole.read_weight_bytes(4) == sum(cost.read_weight_bytes(4) for cost in (one, other))
    assert whole.token_flops == one.token_flops + other.token_flops
    for context in (5, 50):
        read = [
            sum(kind.seen(context) * kind.kv_bytes for kind in cost.attention)
            for cost in (whole, one, other)
        ]
        assert read[0] == read[1] + read[2]
