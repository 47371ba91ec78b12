"""What configuration files say of quantization is served as it is meant, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanocore.kernels.grouped_weight import CheckpointWeight, Float8Weight, GroupedWeight
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.checkpoint import CheckpointTensor
from nanocore.worker.loading.formats import patterns
from nanocore.worker.loading.formats.checkpoint_format import (
    folder_format,
    quantization_settings,
    read_weight_format,
)
from nanocore.worker.loading.weights import CheckpointProjection, Projection, WeightFormat

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPE = (64, 128)
ALL = [
    f"{module}.{end}"
    for module in (Q_PROJ, DOWN_PROJ)
    for end in ("qweight", "g_idx", "weight_packed", "weight_g_idx", "weight_scale",
                "weight_scale_inv")
]  # fmt: skip


def compressed(
    weights: Mapping[str, Any] = WEIGHTS, form: str = "pack-quantized", **changes: Any
) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group of all linear layers."""
    group = {"targets": ["Linear"], "weights": dict(weights), "format": form}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}, **changes}


def float8(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    return compressed(weights, "float-quantized")


def read(
    config: Mapping[str, Any], stored: Iterable[str] = ALL, dtype: str = "F32"
) -> WeightFormat:
    """The format that quantization_config has; stored: tensors that are in the files."""
    settings = Settings("config.json", {"quantization_config": dict(config)})
    said = quantization_settings(settings, None)
    assert said is not None
    tensors = {name: CheckpointTensor(Path("f"), name, dtype, (1,), 0, 4) for name in stored}
    return read_weight_format(said, tensors)


def projection(
    weight_format: WeightFormat,
    name: str = Q_PROJ,
    shape: tuple[int, int] = SHAPE,
    rows: slice | None = None,
    columns: slice | None = None,
) -> CheckpointProjection | None:
    rows, columns = rows or slice(0, shape[0]), columns or slice(0, shape[1])
    return weight_format.projection(Projection(name, shape, rows, columns))


def random_tensors(stored: CheckpointProjection, seed: int = 0) -> dict[str, Tensor]:
    """Whole tensors for slots, of any bits but for the few that must be something."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, slot in stored.slots.items():
        if slot.dtype.is_floating_point and slot.dtype != torch.float8_e4m3fn:
            tensor = torch.rand(slot.shape, generator=random).to(slot.dtype)
        elif name == "weight_shape":
            tensor = torch.tensor(SHAPE)
        elif "g_idx" in name:
            tensor = torch.arange(SHAPE[1], dtype=torch.int32) // 32
            if name == "weight_g_idx":
                tensor = tensor[torch.randperm(SHAPE[1], generator=random)]
        elif slot.dtype == torch.float8_e4m3fn:
            tensor = torch.randn(slot.shape, generator=random).to(slot.dtype)
        else:
            limits = torch.iinfo(slot.dtype)
            tensor = torch.randint(
                limits.min, limits.max, slot.shape, dtype=slot.dtype, generator=random
            )
        tensors[name] = tensor
    return tensors


def unpack(stored: CheckpointProjection, tensors: Mapping[str, Tensor]) -> CheckpointWeight:
    return stored.unpack({name: tensors[name][slot.index] for name, slot in stored.slots.items()})


def dequantize(weight: CheckpointWeight) -> Tensor:
    assert isinstance(weight, GroupedWeight | Float8Weight)
    return weight.dequantize()


SLICED = {
    "awq": AWQ,
    "awq, a scale for each output": AWQ | {"group_size": -1},
    "gptq": GPTQ | {"desc_act": False},
    "gptq, eight bits": GPTQ | {"desc_act": False, "bits": 8},
    "gptq, a scale for each output": GPTQ | {"desc_act": False, "group_size": -1},
    "packed": compressed(),
    "packed, eight bits": compressed(WEIGHTS | {"num_bits": 8}),
    "packed, with zero points": compressed(WEIGHTS | {"symmetric": False}),
    "int8, a scale for each output": compressed(
        {"num_bits": 8, "strategy": "channel"}, "int-quantized"
    ),
    "int8, one scale": compressed({"num_bits": 8, "strategy": "tensor"}, "int-quantized"),
    "int8, groups and zero points": compressed(
        WEIGHTS | {"num_bits": 8, "symmetric": False}, "int-quantized"
    ),
    "float8, one scale": float8("tensor"),
    "float8, a scale for each output": float8("channel"),
    "float8, blocks": float8("block", block_structure=[128, 128]),
    "fp8": FP8 | {"weight_block_size": None},
    "fp8, blocks": FP8,
}


@pytest.mark.parametrize("config", SLICED.values(), ids=SLICED)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(slice(0, 32), slice(0, 128)), (slice(40, 60), slice(0, 128)), (slice(0, 64), slice(96, 128)),
     (slice(33, 64), slice(32, 96))],
)  # fmt: skip
def test_a_rank_s_slice_is_that_slice_of_the_whole(
    config: dict[str, Any], rows: slice, columns: slice
) -> None:
    weight_format = read(config)
    whole, part = projection(weight_format), projection(weight_format, rows=rows, columns=columns)
    assert whole is not None
    assert part is not None
    tensors = random_tensors(whole)
    if config.get("group_size") == -1 and "g_idx" in tensors:
        tensors["g_idx"] = torch.zeros(SHAPE[1], dtype=torch.int32)
    exact = dequantize(unpack(whole, tensors))
    assert exact.shape == SHAPE
    sliced = dequantize(unpack(part, tensors))
    assert torch.equal(sliced.nan_to_num(), exact[rows, columns].nan_to_num())
    assert len(exact.unique()) > 30


def test_blocks_that_ranks_cut_through_become_smaller() -> None:
    shape = (320, 256)
    rows, columns = slice(160, 320), slice(64, 128)
    weight_format = read(FP8)
    whole = projection(weight_format, shape=shape)
    part = projection(weight_format, shape=shape, rows=rows, columns=columns)
    assert whole is not None
    assert part is not None
    tensors = random_tensors(whole)
    exact = dequantize(unpack(whole, tensors))
    assert torch.equal(dequantize(unpack(part, tensors)), exact[rows, columns])


def test_inputs_in_any_order_keep_their_scales() -> None:
    whole = projection(read(compressed(WEIGHTS | {"actorder": "group"})))
    in_order = projection(read(compressed()))
    assert whole is not None
    assert in_order is not None
    tensors = random_tensors(whole)
    weight = unpack(whole, tensors)
    assert isinstance(weight, GroupedWeight)
    assert weight.permutation_I is not None
    # As they lie in the file, with the scale that g_idx names.
    values = unpack(in_order, tensors)
    assert isinstance(values, GroupedWeight)
    scales = values.scale_OG.float()[:, tensors["weight_g_idx"].long()]
    assert torch.equal(weight.dequantize(), scales * (values.values_OI - 8.0))


def test_zero_points_of_gptq_are_stored_less_one_in_version_1() -> None:
    for version, zero in (("gptq", 9), ("gptq_v2", 8)):
        stored = projection(read(GPTQ | {"desc_act": False, "checkpoint_format": version}))
        assert stored is not None
        tensors = random_tensors(stored)
        tensors["qzeros"].fill_(-0x77777778)  # 8 in each four bits
        weight = unpack(stored, tensors)
        assert isinstance(weight, GroupedWeight)
        assert (weight.zero_OG is None) == (zero == 8)
        assert weight.zero_OG is None or bool((weight.zero_OG == zero).all())


@pytest.mark.parametrize(
    ("said", "read_as", "stored"),
    [("checkpoint_format", "gptq", 8), ("format", "gptq", 8), ("format", "gptq_v2", 7)],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zero_points_of_gptq_s_other_version_are_found(
    said: str, read_as: str, stored: int, bits: int
) -> None:
    config = GPTQ | {"desc_act": False, "bits": bits, "sym": True, said: read_as}
    found = projection(read(config))
    assert found is not None
    tensors = random_tensors(found)
    middle = 1 << (bits - 1)
    of_byte = stored * 17 if bits == 4 else stored - 8 + middle
    tensors["qzeros"] = torch.full_like(tensors["qzeros"].view(torch.uint8), of_byte).view(
        torch.int32
    )
    other = "gptq" if read_as == "gptq_v2" else "gptq_v2"
    with pytest.raises(ModelFileError, match=f"set checkpoint_format of .* to {other}$"):
        unpack(found, tensors)
    unpack_as_other = projection(read(config | {said: other}))
    assert unpack_as_other is not None
    weight = unpack(unpack_as_other, tensors)
    assert isinstance(weight, GroupedWeight)
    assert weight.zero_OG is None


def test_zero_points_that_contradict_a_symmetric_weight_are_refused() -> None:
    name = f"{Q_PROJ}.weight_zero_point"
    stored = projection(read(compressed(), [name, f"{Q_PROJ}.weight_packed"]))
    assert stored is not None
    tensors = random_tensors(stored)
    tensors["weight_zero_point"].fill_(-0x77777778)  # 8 in each four bits, which stands for 0
    unpack(stored, tensors)
    tensors["weight_zero_point"][0, 0] += 1
    with pytest.raises(ModelFileError, match="weight_zero_point has zero points other than 0"):
        unpack(stored, tensors)


def test_zero_points_of_old_symmetric_files_are_not_packed() -> None:
    markers = [f"{Q_PROJ}.weight_packed", f"{Q_PROJ}.weight_zero_point"]
    stored = projection(read(compressed(), markers, "I8"))
    assert stored is not None
    assert stored.slots["weight_zero_point"].shape == (SHAPE[0], SHAPE[1] // 32)
    tensors = random_tensors(stored)
    tensors["weight_zero_point"].zero_()
    weight = unpack(stored, tensors)
    assert isinstance(weight, GroupedWeight)
    assert weight.zero_OG is None


def test_all_modules_have_a_g_idx_or_none_has() -> None:
    config = compressed(WEIGHTS | {"actorder": "group"}, quantization_status="frozen")
    packed = [f"{Q_PROJ}.weight_packed", f"{DOWN_PROJ}.weight_packed"]
    for stored, has_g_idx in ((packed, False), ([*packed, f"{Q_PROJ}.weight_g_idx"], True)):
        found = projection(read(config, stored), DOWN_PROJ)
        assert found is not None
        assert ("weight_g_idx" in found.slots) == has_g_idx


@pytest.mark.parametrize(
    ("config", "tensor"),
    [(AWQ, "qweight"), (GPTQ, "qweight"), (compressed(), "weight_packed"),
     (FP8, "weight_scale_inv"), (float8("channel"), "weight_scale")],
)  # fmt: skip
def test_what_files_hold_is_quantized_whatever_lists_say(
    config: dict[str, Any], tensor: str
) -> None:
    """auto-round has lm_head = true of a head that it did not quantize, for one."""
    listed = {"modules_to_not_convert": [Q_PROJ], "ignore": [Q_PROJ], "lm_head": True}
    listed |= {"dynamic": {"-:.*q_proj": {}}}
    weight_format = read(config | listed, [f"{Q_PROJ}.{tensor}", "lm_head.weight"])
    assert projection(weight_format) is not None
    assert projection(weight_format, DOWN_PROJ) is None
    assert projection(weight_format, "lm_head") is None


def test_groups_of_modules_have_schemes_of_their_own() -> None:
    config = compressed()
    config["config_groups"]["b"] = {
        "targets": ["re:.*down_proj"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "format": "float-quantized",
    }
    weight_format = read(config)
    four, eight = projection(weight_format), projection(weight_format, DOWN_PROJ)
    assert four is not None
    assert eight is not None
    assert "weight_packed" in four.slots
    assert eight.slots["weight"].dtype == torch.float8_e4m3fn


def test_dynamic_rules_of_gptq_change_bits_and_groups() -> None:
    rules = {r"+:.*\.0\..*": {"bits": 8, "group_size": -1}}
    weight_format = read(GPTQ | {"desc_act": False, "dynamic": rules})
    eight, four = projection(weight_format), projection(weight_format, DOWN_PROJ)
    assert eight is not None
    assert four is not None
    assert eight.slots["qweight"].shape == (SHAPE[1] // 4, SHAPE[0])
    assert eight.slots["scales"].shape == (1, SHAPE[0])
    assert four.slots["qweight"].shape == (SHAPE[1] // 8, SHAPE[0])


def test_scales_for_static_activations_are_read_and_not_used() -> None:
    config = float8("tensor")
    config["config_groups"]["a"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    stored = projection(read(config))
    assert stored is not None
    assert "input_scale" in stored.slots
    assert "input_scale is not used" in str(read(config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, 'quant_method = "bitsandbytes" is not served'),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "quant_method"),
        (AWQ | {"version": "gemv"}, 'version = "gemv" is not served'),
        (AWQ | {"bits": 8}, "bits = 8 is not served: 4 is"),
        (AWQ | {"group_size": 20}, "group_size = 20 must be -1 or a multiple of 16"),
        (AWQ | {"group_size": 0}, "group_size = 0 must be at least 16"),
        (AWQ | {"group_size": None}, "group_size is missing"),
        (GPTQ | {"bits": 3}, "bits = 3 is not served: 4 or 8 is"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"adapter": {"name": "lora"}}, "adapter"),
        (GPTQ | {"dynamic": {"(": {}}}, r"the pattern '\(' cannot be read"),
        (GPTQ | {"dynamic": {"a" * 5000: {}}}, "has 5000 characters"),
        (GPTQ | {"dynamic": {".*": {"bits": 2}}}, "bits = 2 is not served"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64,64\] is not served"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (compressed(form="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed(form="float-quantized"), "is not what the format float-quantized holds"),
        (compressed(WEIGHTS | {"num_bits": 3}), "num_bits = 3"),
        (compressed(WEIGHTS | {"strategy": "tensor_group"}), "tensor_group"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(transform_config={"config_groups": {"a": 1}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24"}), "sparse-24"),
        (compressed(quantization_status="calibration"), "calibration"),
        (GPTQ | {"format": "marlin"}, "format"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "is not the checkpoint_format"),
        (compressed() | {"config_groups": {}}, "names no group"),
        (float8("block", block_structure=[64, 64]), "block_structure"),
    ],
)
def test_what_is_not_served_is_refused_with_a_remedy(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        read(config)
    assert "compressed-tensors (pack-quantized" in str(caught.value)
    assert "--quantization int4" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        (AWQ, (60, 128), "60 outputs"),
        (AWQ, (64, 120), "not a multiple of group_size = 32"),
        (GPTQ, (64, 132), "132 inputs: GPTQ packs 8"),
    ],
)
def test_shapes_that_cannot_be_packed_so_are_refused(
    config: dict[str, Any], shape: tuple[int, int], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        projection(read(config), shape=shape)


@pytest.mark.parametrize("config", [AWQ, GPTQ | {"desc_act": False}, compressed()])
def test_ranks_that_would_cut_through_groups_are_told_how_many_fit(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"-size 8: .* fit this layer: 1, 2, 4$"):
        projection(read(config), columns=slice(16, 32))


@pytest.mark.parametrize("config", [GPTQ, compressed(WEIGHTS | {"actorder": "group"})])
def test_ranks_cannot_share_inputs_in_any_order(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="any order"):
        projection(read(config), columns=slice(0, 64))


@pytest.mark.parametrize("bad", [-1, 4, 1])
def test_a_g_idx_that_is_no_grouping_is_refused(bad: int) -> None:
    stored = projection(read(GPTQ))
    assert stored is not None
    tensors = random_tensors(stored)
    tensors["g_idx"][0] = bad
    with pytest.raises(ModelFileError, match="g_idx does not give each of 4 groups 32 inputs"):
        unpack(stored, tensors)


@pytest.mark.parametrize("text", ["((a{999}){999}){999}", "a{4000000000}"])
def test_a_pattern_whose_repetitions_take_all_memory_is_refused(text: str) -> None:
    with pytest.raises(ModelFileError, match="more than 10000 repetitions"):
        patterns.Pattern("f", text)


def test_a_pattern_that_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_TIMEOUT_S", 0.05)
    config = compressed()
    config["config_groups"]["a"]["targets"] = ["re:" + "(a|a)" * 40 + "b"]  # 2 ** 40 ways
    weight_format = read(config)
    with pytest.raises(ModelFileError, match=r"takes more than 0\.05 s to match 'aaa"):
        projection(weight_format, "a" * 60)


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ({"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_the_old_file_beside_config_json_is_read(
    tmp_path: Path, old: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    assert folder_format(tmp_path, lambda name: name) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    found = folder_format(tmp_path, lambda name: name)
    assert found is not None
    assert found.name == name


def test_what_a_text_part_says_counts_where_the_top_says_nothing() -> None:
    settings = Settings("config.json", {"text_config": {"quantization_config": AWQ}})
    said = quantization_settings(settings, None)
    assert said is not None
    assert said.name == "text_config.quantization_config"
    assert read_weight_format(said, {}).name == "awq"


@pytest.mark.parametrize("scale_shape", [(2, 3), (200, 1)])
def test_float8_is_near_in_integers(scale_shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(200, 300, generator=random)
    values[3] = 0
    scale = torch.rand(scale_shape, generator=random) + 0.5
    weight = Float8Weight(values.to(torch.float8_e4m3fn), scale)
    exact, rounded = weight.dequantize(), weight.in_integers().dequantize()
    largest = exact.abs().amax(1, keepdim=True)
    assert bool(((exact - rounded).abs() <= largest / 254 * 1.001).all())


def test_every_float8_number_keeps_its_value_in_integers() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = Float8Weight(numbers, torch.ones(256, 1))
    torch.testing.assert_close(
        weight.in_integers().dequantize(), numbers.float(), rtol=1e-6, atol=0, equal_nan=True
    )
