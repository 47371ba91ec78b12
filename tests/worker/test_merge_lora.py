"""`--merge-lora`: the model says what one says whose files were merged, however it is split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.kernels.linear_weight import LinearWeight
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.dry_run import dry_run
from nanocore.worker.layers.decoder import DecoderLayer, fill_and_pack
from nanocore.worker.loading.checked_model import check_files
from nanocore.worker.loading.formats import patterns
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.lora import MergedFormat, read_adapter
from nanocore.worker.models import build_model, load_model_config, model_class
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.worker import Worker
from tests.model_families import BUILDERS, greedy_continuations
from tests.worker.configs import make_worker_config
from tests.worker.lora_adapters import (
    ALPHA,
    PREFIX,
    RANK,
    merge_files,
    modules_of,
    read_config,
    write_adapter,
    write_config,
)
from tests.worker.running import make_runner, run_runner, write_script
from tests.worker.toy_format import ToyFormat

ATTENTION = ("q_proj", "v_proj")
SLOW = "(?:.|.)*[XY]"  # as many ways as there are parts of the name
EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOT_MERGED = "is not merged: only lora_A and lora_B of linear layers are"
UNSERVED = r".*(vision_tower|multi_modal_projector).*"
CPU = torch.device("cpu")
NUM_TOKENS = 6
PROMPTS = [list(range(40, 70)), [9, 8, 7]]


class _Rank(SingleRank):
    """One of several ranks, to be loaded and not to be run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", modules_of(llama, ATTENTION))
    return tmp_path / "adapter"


def placement_of(folder: Path, adapter: Path | None, placement: Placement) -> Placement:
    if adapter is None:
        return placement
    names = model_class(load_model_config(folder).architecture).common_name
    merged = MergedFormat(None, read_adapter(adapter, names), placement.dtype)
    return replace(placement, weight_format=merged)


def loaded(
    folder: Path,
    adapter: Path | None = None,
    placement: Placement | None = None,
    quantization: Quantization | None = None,
) -> list[Tensor]:
    placement = placement_of(folder, adapter, placement or Placement(torch.float32, CPU))
    model = build_model(load_model_config(folder), placement)
    names = model.entry_name
    fill_and_pack(model, TorchKernels(), lambda e: load_weights(folder, e, names), quantization)
    weights: list[LinearWeight] = []
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.mixer, layer.mlp
        weights += [attention.qkv_proj.weight.packed, attention.o_proj.weight.packed]
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if hasattr(mlp, name):
                weights.append(getattr(mlp, name).weight.packed)
    return [weight.data.float() for weight in weights]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)
    )


def said(folder: Path, adapter: Path | None = None) -> tuple[list[int], Tensor]:
    """Tokens and logits after the prompts, of what transformers says of the folder itself."""
    exact = greedy_continuations(folder, PROMPTS, NUM_TOKENS)
    script = write_script(PROMPTS, [one.token_ids for one in exact])
    placement = placement_of(folder, adapter, Placement(torch.float32, CPU))
    samples = run_runner(make_runner(folder, placement), script)
    return [s.token_id for s in samples], torch.stack([s.logits_V for s in samples])


@pytest.mark.parametrize("ends", [ATTENTION, EVERYTHING])
def test_merged_weights_are_those_of_merged_files(
    llama: Path, tmp_path: Path, ends: tuple[str, ...]
) -> None:
    pairs = write_adapter(tmp_path / "adapter", modules_of(llama, ends))
    scales = dict.fromkeys(pairs, ALPHA / RANK)
    merged = merge_files(llama, tmp_path / "merged", pairs, scales)
    expected = loaded(merged)
    assert largest_error(loaded(llama, tmp_path / "adapter"), expected) < 1e-6
    assert largest_error(loaded(llama), expected) > 0.01


def test_ranks_merge_their_slices(llama: Path, tmp_path: Path) -> None:
    pairs = write_adapter(tmp_path / "adapter", modules_of(llama, EVERYTHING))
    merged = merge_files(llama, tmp_path / "merged", pairs, dict.fromkeys(pairs, ALPHA / RANK))
    for rank in range(2):
        placement = Placement(torch.float32, CPU, _Rank(rank, 2))
        expected = loaded(merged, placement=placement)
        actual = loaded(llama, tmp_path / "adapter", placement)
        assert largest_error(actual, expected) < 1e-6


def test_weights_are_quantized_after_they_are_merged(llama: Path, tmp_path: Path) -> None:
    pairs = write_adapter(tmp_path / "adapter", modules_of(llama, EVERYTHING))
    merged = merge_files(llama, tmp_path / "merged", pairs, dict.fromkeys(pairs, ALPHA / RANK))
    expected = loaded(merged, quantization="int8")
    actual = loaded(llama, tmp_path / "adapter", quantization="int8")
    differing = sum(int((a != e).sum()) for a, e in zip(actual, expected, strict=True))
    assert differing <= 1e-4 * sum(map(Tensor.numel, expected))  # ties of rounding


def test_a_bfloat16_weight_is_rounded_once(llama: Path, tmp_path: Path) -> None:
    pairs = write_adapter(tmp_path / "adapter", modules_of(llama, EVERYTHING))
    merged = merge_files(llama, tmp_path / "merged", pairs, dict.fromkeys(pairs, ALPHA / RANK))
    placement = Placement(torch.bfloat16, CPU)
    expected = loaded(merged, placement=placement)
    actual = loaded(llama, tmp_path / "adapter", placement)
    differing = sum(int((a != e).sum()) for a, e in zip(actual, expected, strict=True))
    assert differing <= 1e-3 * sum(map(Tensor.numel, expected))  # ties of rounding


@pytest.mark.parametrize(
    ("settings", "ranks", "scale"),
    [
        ({"use_rslora": True}, {}, lambda name: ALPHA / math.sqrt(RANK)),
        (
            {"rank_pattern": {"q_proj": 2, r"model\.layers\.0\.self_attn\.v_proj": 8}},
            {"q_proj": 2, "layers.0.self_attn.v_proj": 8},
            lambda name: ALPHA / (2 if "q_proj" in name else 8 if ".0." in name else RANK),
        ),
        (
            {"alpha_pattern": {"v_proj": 10, r"layers\.1\..*": 3}, "use_rslora": False},
            {},
            lambda name: (10 if "v_proj" in name else 3 if ".1." in name else ALPHA) / RANK,
        ),
    ],
)
def test_ranks_and_scales_are_those_of_patterns(
    llama: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    ranks: dict[str, int],
    scale: Callable[[str], float],
) -> None:
    shapes = modules_of(llama, ATTENTION)
    own = {name: rank for name in shapes for end, rank in ranks.items() if name.endswith(end)}
    pairs = write_adapter(tmp_path / "adapter", shapes, own, **settings)
    scales = {name: scale(name) for name in pairs}
    expected = loaded(merge_files(llama, tmp_path / "merged", pairs, scales))
    assert largest_error(loaded(llama, tmp_path / "adapter"), expected) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
        {"bias": "none", "use_dora": False, "modules_to_save": None, "a_new_setting": []},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "fan_in_fan_out": False},
    ],
)
def test_settings_that_change_nothing_are_read(
    llama: Path, adapter: Path, settings: dict[str, Any]
) -> None:
    expected = loaded(llama, adapter)
    write_config(adapter, read_config(adapter) | settings)
    assert largest_error(loaded(llama, adapter), expected) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "LOHA"}, 'peft_type = "LOHA" is not implemented; LORA is'),
        ({"use_dora": True}, "use_dora = true is not implemented"),
        ({"bias": "all"}, 'bias = "all" is not implemented'),
        ({"lora_bias": True}, "lora_bias = true is not implemented"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"] is not implemented'),
        ({"layer_replication": [[0, 2]]}, "layer_replication = [[0,2]] is not implemented"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = [1] is not implemented"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = [1] is not implemented"),
        ({"target_parameters": ["experts"]}, 'target_parameters = ["experts"] is not implemented'),
        ({"a_new_setting": 1}, "a_new_setting = 1 is not implemented"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the model's own weights"),
        ({"init_lora_weights": "olora"}, "changed the model's own weights"),
        ({"r": 0}, "r = 0 must be at least 1"),
        ({"r": None}, "r is missing"),
        ({"r": 8}, "says that its rank is 8"),
        ({"rank_pattern": {"v_proj": 0}}, "has a rank that is not from 1"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: the pattern '(.*"),
        ({"alpha_pattern": {"((a{999}){999}){999}": 1}}, "more than 10000 repetitions"),
        ({"rank_pattern": {SLOW: 8}}, "takes more than 0.05 s to match"),
        ({"rank_pattern": {f"v{i}": 1 for i in range(1025)}}, "has 1025 patterns; at most 1024"),
        ({"target_modules": []}, "must name the modules"),
        ({"target_modules": ["k_proj"]}, "is not among the target_modules"),
        ({"target_modules": "q_proj"}, "is not among the target_modules"),
    ],
)
def test_a_setting_that_is_not_merged_is_refused_by_its_name(
    llama: Path,
    adapter: Path,
    settings: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patterns, "_TIMEOUT_S", 0.05)
    write_config(adapter, read_config(adapter) | settings)
    assert words in refusal(llama, adapter)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_adapter_with_values_that_are_no_numbers_is_refused(
    llama: Path, adapter: Path, value: float
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"base_model.model.{name}.lora_B.weight"][1, 1] = value
    save_file(tensors, path)
    assert f"module {name!r} has NaN or infinity" in refusal(llama, adapter)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_adapter_that_makes_infinity_of_a_weight_is_refused_at_load(
    llama: Path, adapter: Path, dtype: str, quantization: Quantization | None
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    module = f"{PREFIX}model.layers.0.self_attn.q_proj"
    for end in ("A", "B"):
        tensors[f"{module}.lora_{end}.weight"] *= 0
        tensors[f"{module}.lora_{end}.weight"] += 1e30
    save_file(tensors, path)
    config = make_worker_config(
        folder=str(llama), load_format="auto", merge_lora=str(adapter), dtype=dtype,
        quantization=quantization,
    )  # fmt: skip
    with pytest.raises(ModelFileError, match="q_proj' makes its weight infinite; its numbers"):
        Worker(config).load_model()


def refusal(folder: Path, adapter: Path) -> str:
    config = make_worker_config(folder=str(folder), load_format="auto", merge_lora=str(adapter))
    with pytest.raises(ModelFileError) as checked:
        dry_run(config)
    with pytest.raises(ModelFileError) as loading:
        Worker(config)
    assert str(checked.value) == str(loading.value)
    assert str(adapter) in str(loading.value)
    return str(loading.value)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("model.layers.0.self_attn.q_proj.lora_C.weight", NOT_MERGED),
        ("model.embed_tokens.lora_embedding_A", NOT_MERGED),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", "has no counterpart lora_B"),
        ("model.layers.0.mlp.experts.3.q_proj.lora_A.weight", "is of experts"),
    ],
)
def test_a_tensor_that_is_not_merged_is_refused_by_its_name(
    llama: Path, adapter: Path, added: str, words: str
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[PREFIX + added] = torch.ones(RANK, 2)
    save_file(tensors, path)
    assert f"tensor '{PREFIX}{added}' {words}" in refusal(llama, adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_an_adapter_comes_with_must_be_the_model_s(
    llama: Path, adapter: Path, dtype: torch.dtype
) -> None:
    module = "model.layers.1.self_attn.q_proj"
    path = adapter / "adapter_model.safetensors"
    pairs = load_file(path)
    own = load_file(llama / "model.safetensors")[f"{module}.weight"].to(dtype)
    expected = loaded(llama, adapter)
    save_file(pairs | {f"{PREFIX}{module}.base_layer.weight": own}, path)
    assert largest_error(loaded(llama, adapter), expected) == 0
    own[3, 5] += 1
    save_file(pairs | {f"{PREFIX}{module}.base_layer.weight": own}, path)
    with pytest.raises(
        ModelFileError, match=r"q_proj' comes with a base_layer\.weight that is not"
    ):
        loaded(llama, adapter)


def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    shapes = modules_of(llama, ATTENTION)
    write_adapter(tmp_path / "wide", {name: (rows, 96) for name, (rows, _) in shapes.items()})
    assert "the adapter is of another model" in refusal(llama, tmp_path / "wide")
    write_adapter(tmp_path / "deep", {**shapes, "model.layers.7.self_attn.q_proj": (64, 64)})
    message = refusal(llama, tmp_path / "deep")
    assert "model.layers.7.self_attn.q_proj' is not part of this model" in message


def test_what_is_no_adapter_is_told_with_a_remedy(llama: Path, adapter: Path) -> None:
    assert "there is no adapter_config.json" in refusal(llama, adapter / "nowhere")
    path = adapter / "adapter_model.safetensors"
    path.rename(adapter / "adapter_model.bin")
    assert "safe_serialization=True" in refusal(llama, adapter)
    (adapter / "adapter_model.bin").unlink()
    assert "adapter_model.safetensors is missing" in refusal(llama, adapter)
    path.write_bytes(b"{}")
    assert "damaged" in refusal(llama, adapter) or "download" in refusal(llama, adapter)


def test_a_weight_that_is_stored_quantized_is_not_merged(llama: Path, adapter: Path) -> None:
    merged = MergedFormat(ToyFormat(q_proj="four"), read_adapter(adapter, str), torch.float32)
    placement = Placement(torch.float32, CPU, weight_format=merged)
    model = build_model(load_model_config(llama), placement)
    with pytest.raises(ModelFileError, match=r"q_proj' is stored as toy.*--quantization"):
        check_files(make_worker_config(folder=str(llama)), model)


def test_a_check_reckons_with_the_merged_model(llama: Path, adapter: Path) -> None:
    plain, merged = (
        dry_run(make_worker_config(folder=str(llama), load_format="auto", merge_lora=lora))
        for lora in (None, str(adapter))
    )
    assert [rank.cost for rank in plain] == [rank.cost for rank in merged]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "olmo2", "mistral3", "qwen2"])
def test_the_model_says_what_peft_says_of_its_merge(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    from tests.model_families import reference_model

    folder = BUILDERS[name](tmp_path / "model")
    config = LoraConfig(
        r=4, lora_alpha=3, init_lora_weights=False, target_modules="all-linear",
        exclude_modules=UNSERVED if name == "mistral3" else None, use_rslora=True,
        fan_in_fan_out=name == "gpt2", rank_pattern={r"1\..*": 6}, alpha_pattern={r"0\..*": 5},
    )  # fmt: skip
    torch.manual_seed(0)
    get_peft_model(reference_model(folder), config).save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(reference_model(folder), tmp_path / "adapter")
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = loaded(tmp_path / "merged")
    assert largest_error(loaded(folder, tmp_path / "adapter"), expected) < 1e-6
    assert largest_error(loaded(folder), expected) > 0.01

    exact = greedy_continuations(tmp_path / "merged", PROMPTS, NUM_TOKENS)
    script = write_script(PROMPTS, [one.token_ids for one in exact])
    placement = placement_of(folder, tmp_path / "adapter", Placement(torch.float32, CPU))
    samples = run_runner(make_runner(folder, placement), script)
    tokens = {(sample.request, sample.index): sample.token_id for sample in samples}
    assert tokens == {
        (i, t): token for i, one in enumerate(exact) for t, token in enumerate(one.token_ids)
    }
