"""Weights between a checkpoint's format and a backend: stored, joined or in segments, and gone."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanocore.kernels.group_quantization import (
    LARGEST,
    SMALLEST,
    quantize_eight_bits,
    quantize_groups,
)
from nanocore.kernels.grouped_weight import Float8Weight, GroupedWeight, join_adjacent
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.linear_weight import FP8
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.cost.model_cost import ModelCost
from nanocore.worker.cost.rank_cost import rank_cost
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.layers.linear import ColumnParallelLinear, RowParallelLinear, RowShard
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading import loader
from nanocore.worker.loading.checked_model import read_weight_format
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.weights import Buffer
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization
from tests.model_families import BUILDERS
from tests.worker.configs import make_worker_config
from tests.worker.filling import fill
from tests.worker.running import make_kernels, step_of
from tests.worker.toy_format import ToyFormat, stored_tensors

CPU = torch.device("cpu")
IN_FEATURES = 64
PARTS = {"q": 96, "k": 32, "v": 32}
MIXTURES = [
    ({}, 0),
    ({"q": "four", "k": "four", "v": "four"}, 0),
    ({"q": "zeros", "k": "zeros", "v": "zeros"}, 0),
    ({"q": "four", "k": "four", "v": "zeros"}, 2),
    ({"q": "four", "v": "four"}, 3),
    ({"q": "float8", "k": "float8", "v": "float8"}, 0),
    ({"q": "float8", "k": "four"}, 3),
]
"""Kinds of q, k and v, and how many segments they make; none if they are one weight."""


class _Rank(SingleRank):
    """One of several ranks, whose partial sums are looked at."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def stored_qkv(kinds: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stored, meaning = {}, {}
    for seed, (name, size) in enumerate(PARTS.items()):
        tensors, meaning[name] = stored_tensors(name, kinds.get(name), (size, IN_FEATURES), seed)
        stored |= tensors
    return stored, meaning


def qkv_layer(placement: Placement) -> ColumnParallelLinear:
    parts = [RowShard.share(placement, size, name) for name, size in PARTS.items()]
    return ColumnParallelLinear(placement, IN_FEATURES, parts)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("kinds", "num_segments"), MIXTURES)
def test_projections_are_one_weight_where_they_are_alike_and_segments_elsewhere(
    kinds: dict[str, str], num_segments: int, backend: str
) -> None:
    kernels = make_kernels(backend)
    layer = qkv_layer(Placement(torch.float32, CPU, weight_format=ToyFormat(**kinds)))
    layer.pack(WeightPacker(kernels, torch.float32))
    stored, meaning = stored_qkv(kinds)
    fill(layer.entries(*PARTS), stored)
    assert len(layer.weight.packed.segments) == num_segments
    x = random_rows(5, IN_FEATURES)
    expected = x @ torch.cat(list(meaning.values())).t()
    assert relative_error(layer(x, step_of(kernels)), expected) < tolerance(kernels, kinds)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_gate_and_up_in_segments_are_gated_as_one(backend: str) -> None:
    kernels, kinds = make_kernels(backend), {"gate": "four"}
    placement = Placement(torch.float32, CPU, weight_format=ToyFormat(**kinds))
    rows = RowShard.share(placement, 64, "the size")
    layer = ColumnParallelLinear(placement, IN_FEATURES, [rows, rows])
    layer.pack(WeightPacker(kernels, torch.float32))
    gates, gate = stored_tensors("gate", "four", (64, IN_FEATURES), 0)
    ups, up = stored_tensors("up", None, (64, IN_FEATURES), 1)
    fill(layer.entries("gate", "up"), gates | ups)
    x = random_rows(5, IN_FEATURES)
    gated = kernels.gated_linear(x, layer.weight.packed)
    expected = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    assert relative_error(gated, expected) < tolerance(kernels, kinds)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def tolerance(kernels: Kernels, kinds: dict[str, str]) -> float:
    """The native kernels round activations to eight bits for weights that are quantized."""
    return 0.01 if kernels.name == "cpu" and any(kinds.values()) else 1e-5


@pytest.mark.parametrize("kinds", [kinds for kinds, _ in MIXTURES])
def test_ranks_have_their_rows_and_columns_of_what_is_stored(kinds: dict[str, str]) -> None:
    stored, meaning = stored_qkv(kinds)
    out, out_meaning = stored_tensors("o", kinds.get("q"), (48, 2 * IN_FEATURES), 7)
    weight_format = ToyFormat(**kinds, o=kinds.get("q"))
    kernels = TorchKernels()
    for rank in range(2):
        placement = Placement(torch.float32, CPU, _Rank(rank, 2), weight_format=weight_format)
        layer = qkv_layer(placement)
        layer.pack(WeightPacker(kernels, torch.float32))
        fill(layer.entries(*PARTS), stored)
        x = random_rows(3, IN_FEATURES)
        own = torch.cat([weight.chunk(2)[rank] for weight in meaning.values()])
        torch.testing.assert_close(layer(x, step_of(kernels)), x @ own.t())
        row_layer = RowParallelLinear(placement, 2 * IN_FEATURES, 48, "the size")
        row_layer.pack(WeightPacker(kernels, torch.float32))
        fill(row_layer.entries("o"), out)
        own = out_meaning.chunk(2, dim=1)[rank]
        torch.testing.assert_close(row_layer(x, step_of(kernels)), x @ own.t())


@pytest.mark.parametrize("kind", [None, "four", "float8"])
def test_projections_that_a_checkpoint_stacks_are_cut_apart(kind: str | None) -> None:
    total = sum(PARTS.values())
    stored, meaning = stored_tensors("qkv", kind, (total, IN_FEATURES))
    kernels = TorchKernels()
    weight_format = ToyFormat(**({"qkv": kind} if kind else {}))
    for rank in range(2):
        placement = Placement(torch.float32, CPU, _Rank(rank, 2), weight_format=weight_format)
        layer = qkv_layer(placement)
        layer.pack(WeightPacker(kernels, torch.float32))
        entries = layer.fused_entries("qkv")
        fill(entries, stored)
        assert sum(entry.counted_params for entry in entries.values()) == total * IN_FEATURES
        own = torch.cat([part.chunk(2)[rank] for part in meaning.split([*PARTS.values()])])
        x = random_rows(3, IN_FEATURES)
        torch.testing.assert_close(layer(x, step_of(kernels)), x @ own.t())


def test_a_stored_tensor_of_another_dtype_is_refused(tmp_path: Path) -> None:
    placement = Placement(torch.float32, CPU, weight_format=ToyFormat(q="four"))
    layer = ColumnParallelLinear(placement, IN_FEATURES, [RowShard.share(placement, 96, "q")])
    stored, _ = stored_tensors("q", "four", (96, IN_FEATURES))
    for name, dtype in (("q.values", "U8"), ("q.scales", "F16")):
        wrong = {**stored, name: stored[name].to(torch.int32)}
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ModelFileError, match=rf"{name}' is I32, and {dtype} is needed"):
            load_weights(tmp_path, layer.entries("q"), str)


def test_what_is_stored_is_loaded_from_files(tmp_path: Path) -> None:
    kinds = {"q": "four", "k": "float8"}
    stored, meaning = stored_qkv(kinds)
    save_file(stored, tmp_path / "model.safetensors")
    layer = qkv_layer(Placement(torch.float32, CPU, weight_format=ToyFormat(**kinds)))
    layer.pack(WeightPacker(TorchKernels(), torch.float32))
    num_bytes = load_weights(tmp_path, layer.entries(*PARTS), str)
    assert num_bytes == sum(tensor.nbytes for tensor in stored.values())
    x = random_rows(3, IN_FEATURES)
    expected = x @ torch.cat(list(meaning.values())).t()
    torch.testing.assert_close(layer(x, step_of(TorchKernels())), expected)


def test_outlines_are_joined_without_torch_s_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cat", None)  # which imports it for meta tensors, in seconds
    (joined,) = join_adjacent([torch.empty(rows, 8, device="meta") for rows in (4, 2)])
    assert isinstance(joined, Tensor)
    assert (joined.shape, joined.is_meta) == ((6, 8), True)


def test_block_scales_are_joined_only_where_blocks_end() -> None:
    def weight(num_rows: int) -> Float8Weight:
        values = random_rows(num_rows, 256).to(FP8)
        return Float8Weight(values, torch.rand(-(-num_rows // 128), 2))

    whole, part = weight(256), weight(64)
    (joined,) = join_adjacent([whole, part])
    assert isinstance(joined, Float8Weight)
    expected = torch.cat([whole.dequantize(), part.dequantize()])
    assert torch.equal(joined.dequantize(), expected)
    assert join_adjacent([part, whole]) == [part, whole]


def test_groups_that_are_permuted_differently_are_not_joined() -> None:
    def weight(seed: int) -> GroupedWeight:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(seed)).int()
        values, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2)
        return GroupedWeight(values, 4, 16, scale, permutation_I=order)

    assert len(join_adjacent([weight(0), weight(0), weight(1), weight(0)])) == 3


class _Alive:
    """Bytes of buffers that are there, and the most that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = self.peak_bytes = self.total_bytes = 0
        view = Buffer.view

        def counting(buffer: Buffer, of_outline: Tensor) -> Tensor:
            is_new = buffer._memory is None
            seen = view(buffer, of_outline)
            if is_new:
                storage = seen.untyped_storage()
                self._count(storage.nbytes())
                self.total_bytes += storage.nbytes()
                weakref.finalize(storage, self._count, -storage.nbytes())
            return seen

        monkeypatch.setattr(Buffer, "view", counting)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("load_format", ["files", "dummy"])
def test_a_weight_is_in_memory_twice_only_while_it_is_packed(
    load_format: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BUILDERS["qwen3"](tmp_path)
    model = build_model(load_model_config(folder), Placement(torch.float32, CPU))
    outlines = [p.buffer.outline for e in model.entries().values() for p in e.parts if p.buffer]
    largest_bytes = max(outline.nbytes for outline in outlines)
    monkeypatch.setattr(loader, "BUFFERED_BYTES", largest_bytes)
    alive = _Alive(monkeypatch)
    if load_format == "dummy":
        fill_and_pack(model, make_kernels("cpu"), fill_dummy_weights, quantization)
    else:
        names = model.entry_name
        kernels = make_kernels("cpu")
        fill_and_pack(model, kernels, lambda e: load_weights(folder, e, names), quantization)
    assert alive.total_bytes == sum({id(o): o.nbytes for o in outlines}.values())
    assert alive.num_bytes == 0
    assert largest_bytes <= alive.peak_bytes <= 2 * largest_bytes < alive.total_bytes


def test_dummy_weights_of_a_quantized_model_are_refused(tmp_path: Path) -> None:
    folder = BUILDERS["qwen3"](tmp_path)
    config, model = make_worker_config(folder=str(folder)), load_model_config(folder)
    assert config.load_format == "dummy"
    assert read_weight_format(config, model, torch.float32) is None
    says = json.loads((folder / "config.json").read_text())
    says["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(says))
    with pytest.raises(ConfigError, match=r"dummy: .*config.json has quantization_config: take it"):
        read_weight_format(config, model, torch.float32)


def test_a_check_reckons_with_the_bytes_that_are_kept(tmp_path: Path) -> None:
    folder = BUILDERS["qwen3"](tmp_path)
    kinds = dict.fromkeys(("q_proj", "k_proj", "v_proj", "up_proj"), "four")
    outline = Placement(torch.float32, torch.device("meta"), weight_format=ToyFormat(**kinds))
    plain = replace(outline, weight_format=None)
    config = make_worker_config(folder=str(folder))

    def cost(placement: Placement, backend: str) -> ModelCost:
        model = build_model(load_model_config(folder), placement)
        layout = KVLayout(model.cache_specs, kv_cache_format("auto", torch.float32), 16)
        return rank_cost(model, layout, config, make_kernels(backend))

    floats, widened, kept = (
        cost(*case) for case in ((plain, "torch"), (outline, "torch"), (outline, "cpu"))
    )
    assert floats == widened
    params = 3 * (64 * 24 * (4 + 2 + 2) + 160 * 64)
    saved = params * (4 - 1) - params // 16 * 2  # as ToyFormat stores them, a byte a value
    assert floats.held_bytes - kept.held_bytes == saved
    assert (floats.num_params, floats.token_params) == (kept.num_params, kept.token_params)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_number_that_no_float16_scale_has_room_for_is_refused(
    quantization: Quantization, backend: str
) -> None:
    packer = WeightPacker(make_kernels(backend), torch.float32, quantization)
    weight_OI = torch.ones(32, 64)
    weight_OI[3, 5] = -0.999 * LARGEST
    packed = packer.linear([weight_OI.clone()])
    x_TI = torch.zeros(1, 64)
    x_TI[0, 5] = 1
    assert make_kernels(backend).linear(x_TI, packed).isfinite().all()
    weight_OI[3, 5] *= 1.1
    with pytest.raises(
        ModelFileError, match=f"--quantization {quantization} takes 0.000244141 to 6.5504e"
    ):
        packer.linear([weight_OI])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_numbers_that_float16_scales_would_round_to_zero_are_refused(
    quantization: Quantization, backend: str
) -> None:
    packer = WeightPacker(make_kernels(backend), torch.float32, quantization)
    weight_OI = torch.rand(32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight_OI[0, 0] = 1
    x_TI = torch.eye(64)
    exact_TO = x_TI @ weight_OI.t()
    packed = packer.linear([1.01 * SMALLEST * weight_OI])
    y_TO = make_kernels(backend).linear(x_TI, packed) / (1.01 * SMALLEST)
    assert (y_TO - exact_TO).abs().max() < 0.15  # a fifteenth of the range, and four steps more
    with pytest.raises(ModelFileError, match="scales are float16"):
        packer.linear([0.99 * SMALLEST * weight_OI])
    assert make_kernels(backend).linear(x_TI, packer.linear([0 * weight_OI])).eq(0).all()


@pytest.mark.parametrize("cuts", [[160], [96, 64], [96, 32, 32], [80, 80], [130, 30]])
def test_keys_and_values_have_eight_bits_where_queries_have_four(cuts: list[int]) -> None:
    weight_OI = torch.randn(160, 64, generator=torch.Generator().manual_seed(0))
    packer = WeightPacker(make_kernels("torch"), torch.float32, "int4")
    packed = packer.attention(64, list(weight_OI.split(cuts)))
    rows_OI = TorchKernels().linear(torch.eye(64), packed).t()
    assert torch.equal(rows_OI[:96], quantize_groups(weight_OI[:96]).dequantize())
    assert torch.equal(rows_OI[96:], quantize_eight_bits(weight_OI[96:]).dequantize())
    assert (packer.num_params, packed.out_features) == (160 * 64, 160)
