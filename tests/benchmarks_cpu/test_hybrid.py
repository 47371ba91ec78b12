"""The GGUF file of a hybrid model is the model, and figures of steps are of what they say."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nanocore.worker.cost.model_cost import AttentionCost, MachineSpeed, ModelCost
from tests.worker.running import model_groups, run_script, write_script


@pytest.fixture
def hybrid() -> Any:
    return import_module("hybrid")


def test_a_gguf_file_says_what_the_folder_says(tmp_path: Path) -> None:
    models, checkpoints = import_module("models"), import_module("checkpoints")
    folder = tmp_path / "model"
    models.make_model(models.SHAPES["tiny-hybrid"], folder)
    path = checkpoints.Checkpoints(folder, tmp_path).path("bf16")
    prompt = [7 * i % 512 for i in range(70)]
    script = write_script([prompt], [[1, 2, 3, 4]], kv_groups=model_groups(folder))
    theirs, ours = (run_script(one, script, backend="torch") for one in (folder, path))
    assert len(ours) == 4
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(other.logits_V, one.logits_V, rtol=1e-4, atol=1e-4)


def test_a_forecast_is_the_longer_of_reading_and_computing(hybrid: Any) -> None:
    attention = AttentionCost(window=0, kv_bytes=10.0, pair_flops=5)
    cost = ModelCost(
        num_params=0, token_params=1000, head_params=500, weight_bytes=4000,
        attention=[attention], state_bytes=300,
    )  # fmt: skip
    slow_memory = MachineSpeed(bytes_per_s=1e3, flops_per_s=1e9)
    assert hybrid.forecast_ms(cost, slow_memory, 2, 20) == 4000 + 2 * (2 * 300 + 20 * 10)
    slow_cores = MachineSpeed(bytes_per_s=1e9, flops_per_s=1e3)
    assert hybrid.forecast_ms(cost, slow_cores, 2, 20) == 2 * (2 * 1500 + 20 * 5)


def test_a_step_is_that_of_the_request_that_started_last(hybrid: Any) -> None:
    run = import_module("peer_process").PeerRun(
        wall_s=9.0, ttft_s=[1.0, 3.0, 2.0], tpot_s=[0.3, 0.1, 0.2], num_output_tokens=[],
        first_token_ids=[],
    )  # fmt: skip
    assert (hybrid.prompt_s(run), hybrid.step_s(run)) == (3.0, 0.1)
