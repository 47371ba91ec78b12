"""Qwen3-Next's and Qwen3.5's files: other spellings of the same model, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.config.rope_config import RopeConfig
from nanocore.worker.dry_run import dry_run
from nanocore.worker.models import load_model_config
from tests.model_families import BUILDERS
from tests.worker.configs import make_worker_config
from tests.worker.running import Sample, model_groups, run_script, write_script

PROMPTS = [[3 + 7 * i % 300 for i in range(40)], [200 - i for i in range(9)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "qwen35_square", "qwen35_moe", "qwen3_next"
    return {name: BUILDERS[name](tmp_path_factory.mktemp(name)) for name in names}


def logits(folder: Path) -> Tensor:
    """Behind each prompt."""
    script = write_script(PROMPTS, [[1]] * len(PROMPTS), kv_groups=model_groups(folder))
    samples: list[Sample] = run_script(folder, script)
    return torch.stack([one.logits_V for one in sorted(samples, key=lambda one: one.request)])


def rewritten(
    folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None] | None = None, **own: Any
) -> Path:
    """A copy with other tensors, and other settings."""
    shutil.copytree(folder, to)
    settings = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(settings | own))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, to / "model.safetensors")
    return to


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """As published checkpoints have them: all of a layer's in two tensors."""
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        parts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
        for i in range(8):
            for name, found in parts.items():
                found.append(tensors.pop(f"{layer}.experts.{i}.{name}_proj.weight"))
        gates_and_ups = zip(parts["gate"], parts["up"], strict=True)
        stacked = torch.stack([torch.cat(both) for both in gates_and_ups])
        tensors[f"{layer}.experts.gate_up_proj"] = stacked
        tensors[f"{layer}.experts.down_proj"] = torch.stack(parts["down"])


def test_experts_in_one_tensor_are_the_same_model(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen35_moe"]
    stacked = rewritten(folder, tmp_path / "stacked", stack_experts)
    assert torch.equal(logits(stacked), logits(folder))


def test_tensors_of_images_and_of_heads_that_guess_are_not_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"):
            tensors[name] = torch.full((4, 4), float("nan"))

    folder = folders["qwen35_square"]
    assert torch.equal(logits(rewritten(folder, tmp_path / "more", add)), logits(folder))


def test_stacked_experts_of_an_odd_shape_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        stack_experts(tensors)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name][:, :-1].contiguous()

    folder = rewritten(folders["qwen35_moe"], tmp_path / "cut", cut)
    match = r"layers\.0\.mlp\.experts\.gate_up_proj.* is \[8, 95, 64\]: not one of gate_proj and up"
    with pytest.raises(ModelFileError, match=match):
        dry_run(make_worker_config(folder=str(folder), load_format="auto"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"layer_types": ["linear_attention", "mamba", "full_attention", "full_attention"]},
         "layer 1 is 'mamba' in layer_types, .* known: linear_attention, full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types .*must have 4 entries, one per layer"),
        ({"layer_types": ["linear_attention"] * 4}, "none of the 4 layers is full_att"),
        ({"layer_types": None, "full_attention_interval": 9}, "none of the 4 layers is full_att"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is no multiple of linear_num"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim = 9 .*at most 8"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = .* is not implemented .* known: silu"),
        ({"attn_output_gate": False}, "attn_output_gate = false is not implemented"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    folder = rewritten(folders["qwen35_square"], tmp_path / "odd", **settings)
    with pytest.raises(ModelFileError, match=match):
        load_model_config(folder)


def test_ranks_share_key_heads_and_no_more_ranks_than_there_are_of_them(
    folders: dict[str, Path],
) -> None:
    config = make_worker_config(folder=str(folders["qwen35_square"]), tensor_parallel_size=4)
    with pytest.raises(
        ConfigError, match=r"size 4: the number of key heads \(linear_num_key_heads\) is 2"
    ):
        dry_run(config)


def test_positions_in_images_say_nothing_about_text(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A quarter of a head rotates unless the file says otherwise."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    folder = rewritten(folders["qwen35_square"], tmp_path / "axes", rope_parameters=rope)
    rotation = load_model_config(folder).attention.rope["full_attention"]
    assert rotation == RopeConfig(
        rotary_dim=16,
        theta=1e7,
        original_max_position_embeddings=rotation.original_max_position_embeddings,
    )


def test_mlps_in_place_of_experts_are_where_the_file_says(folders: dict[str, Path]) -> None:
    moe = load_model_config(folders["qwen3_next"]).moe
    assert moe is not None
    assert moe.sparse_layers == {0, 2, 3, 4}
    assert moe.norm_topk_prob
