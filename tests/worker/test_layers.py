"""Layers by themselves: what transformers rounds to the bit, and what ranks cannot share."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.attention_step import make_inputs
from nanocore.kernels.grouped_weight import CheckpointWeight
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.linear import RowParallelLinear
from nanocore.worker.layers.norm import LayerNorm, RMSNorm
from nanocore.worker.layers.packing import Weight, WeightPacker
from nanocore.worker.loading.weights import Projection
from nanocore.worker.models import build_model, load_model_config, model_class
from nanocore.worker.models.gemma import Gemma2Model
from nanocore.worker.placement import Placement
from tests.model_families import BUILDERS
from tests.worker.filling import fill, fill_with
from tests.worker.running import step_of

CPU, META = torch.device("cpu"), torch.device("meta")


class _Rank(SingleRank):
    """One of several ranks, to be built for and not to be run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def config_of(name: str, folder: Path) -> ModelConfig:
    return load_model_config(BUILDERS[name](folder))


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3", "llama", "olmo2"])
def test_a_bfloat16_norm_rounds_as_transformers_does(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = BUILDERS[name](tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.norm
    config = load_model_config(folder)
    norm_class = model_class(config.architecture).layer_class.norm_class
    norm = norm_class(Placement(torch.bfloat16, CPU), config, config.hidden_size)
    assert isinstance(norm, RMSNorm)
    norm.weight.copy_(theirs.weight.detach().float() + getattr(norm, "offset", 0.0))
    x = 7 * values(100, config.hidden_size)
    assert torch.equal(norm(x, TorchKernels()), theirs(x))


def test_a_bfloat16_layer_norm_rounds_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = BUILDERS["gpt2"](tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).transformer.ln_f
    config = load_model_config(folder)
    norm = LayerNorm(Placement(torch.bfloat16, CPU), config, config.hidden_size)
    for name, entry in norm.entries("n").items():
        entry.parts[0].target.copy_(getattr(theirs, name.removeprefix("n.")).detach())
    x, residual = 7 * values(100, config.hidden_size), values(100, config.hidden_size) + 1
    normed, total = norm.add(x, residual, TorchKernels())
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, theirs(total))
    rows = torch.tensor([7, 0, 7])
    assert torch.equal(norm.select_add(x, residual, rows, TorchKernels()), normed[rows])


def assert_equal_embeddings(model: DecoderModel, token_ids: Tensor, expected: Tensor) -> None:
    x_TE = model.begin_step(make_inputs(token_ids).rows, TorchKernels()).x_TE
    assert x_TE is not None
    assert torch.equal(x_TE, expected)


def test_bfloat16_embeddings_are_scaled_as_transformers_does(tmp_path: Path) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    config = config_of("gemma2", tmp_path)
    config = replace(config, hidden_size=72)
    model = Gemma2Model(config, Placement(torch.bfloat16, CPU))
    theirs = Gemma2TextScaledWordEmbedding(config.vocab_size, 72, 0, 72**0.5)
    theirs = theirs.bfloat16()
    assert model.embedding is not None
    fill(model.embedding.entries("e"), {"e.weight": theirs.weight.detach()})
    ids = torch.arange(config.vocab_size)
    model.embedding.pack(WeightPacker(TorchKernels(), torch.bfloat16))
    assert_equal_embeddings(model, ids, theirs(ids))


@pytest.mark.parametrize("name", BUILDERS)
def test_weights_are_filled_then_packed_once_and_filled_no_more(name: str, tmp_path: Path) -> None:
    model = build_model(config_of(name, tmp_path), Placement(torch.float32, CPU))
    packer = WeightPacker(TorchKernels(), torch.float32)
    fill_with(1)(model.entries())
    model.pack(packer)
    for use in (model.entries, lambda: model.pack(packer)):
        with pytest.raises(AssertionError, match="packed, and filled no more"):
            use()


def test_a_weight_that_is_not_packed_multiplies_nothing() -> None:
    placement = Placement(torch.float32, CPU)
    layer = RowParallelLinear(placement, 4, 3, "the size")
    context = step_of(TorchKernels())
    with pytest.raises(AssertionError, match="not packed yet"):
        layer(torch.ones(2, 4), context)
    fill_with(2)(layer.entries("a"))
    layer.pack(WeightPacker(TorchKernels(), torch.float32))
    assert layer(torch.ones(2, 4), context).tolist() == [[8.0] * 3] * 2


def test_a_packed_weight_holds_no_memory_but_the_backends() -> None:
    stored: list[weakref.ref[Tensor]] = []

    class Copying(TorchKernels):
        def pack_linear(
            self,
            weight: CheckpointWeight,
            quantization: str | None = None,
            dtype: torch.dtype | None = None,
        ) -> LinearWeight:
            assert isinstance(weight, Tensor)
            stored.append(weakref.ref(weight))
            return super().pack_linear(weight.clone(), quantization)

    weight = Weight(Placement(torch.float32, CPU), 3, 4)
    weight.pack(WeightPacker(Copying(), torch.float32).linear)
    fill_with(1)(weight.entries(Projection("a", (3, 4), slice(0, 3), slice(0, 4))))
    assert [reference() for reference in stored] == [None]
    assert torch.equal(weight.packed.data, torch.ones(3, 4))


def test_a_bfloat16_granite_rounds_its_scaled_embeddings_once(tmp_path: Path) -> None:
    config = config_of("granite", tmp_path)
    model = build_model(config, Placement(torch.bfloat16, CPU))
    assert model.embedding is not None
    weight = values(config.vocab_size, config.hidden_size).bfloat16()
    fill(model.embedding.entries("e"), {"e.weight": weight})
    model.embedding.pack(WeightPacker(TorchKernels(), torch.bfloat16))
    scaled = (weight.double() * (4 / 0.7)).bfloat16()
    assert_equal_embeddings(model, torch.arange(config.vocab_size), scaled)


@pytest.mark.parametrize(
    ("name", "tp_size", "attention", "mlp", "words"),
    [
        ("llama", 3, {}, {}, "the number of heads (num_attention_heads) is 8"),
        (
            "llama",
            4,
            {"num_kv_heads": 6, "num_heads": 12},
            {},
            "the number of KV heads (num_key_value_heads) is 6",
        ),
        ("gemma2", 4, {}, {"inner_size": 90}, "intermediate_size is 90"),
        ("phi3", 4, {}, {"inner_size": 90}, "intermediate_size is 90"),
    ],
)
def test_what_ranks_cannot_share_is_named(
    name: str, tp_size: int, attention: dict, mlp: dict, words: str, tmp_path: Path
) -> None:
    config = config_of(name, tmp_path)
    config = replace(
        config, attention=replace(config.attention, **attention), mlp=replace(config.mlp, **mlp)
    )
    assert refusal(config, tp_size) == words


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"inner_size": 50}, "moe_intermediate_size is 50"),
        ("qwen2_moe", {"inner_size": 50}, "moe_intermediate_size is 50"),
        (
            "qwen2_moe",
            {"shared_inner_size": 50},
            "shared_expert_intermediate_size is 50",
        ),
    ],
)
def test_experts_that_ranks_cannot_share_are_named(
    name: str, changes: dict, words: str, tmp_path: Path
) -> None:
    config = config_of(name, tmp_path)
    assert config.moe is not None
    assert refusal(replace(config, moe=replace(config.moe, **changes)), 4) == words


def refusal(config: ModelConfig, tp_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        build_model(config, Placement(torch.float32, META, _Rank(tp_size - 1, tp_size)))
    start, _, words = str(error.value).partition(": ")
    assert start == f"--tensor-parallel-size {tp_size}"
    words, _, remedy = words.partition(", ")
    assert remedy == "which is not divisible by it; choose a divisor"
    return words


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    placement = Placement(torch.float32, META, pp_size=4)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 4: the model has 3 layers"):
        build_model(config_of("gemma3", tmp_path), placement)


@pytest.mark.parametrize("name", BUILDERS)
def test_ranks_of_all_stages_keep_every_value_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    kept: dict[str, Tensor] = {}
    for stage in range(2):
        for rank in range(2):
            placement = Placement(torch.float32, META, _Rank(rank, 2), stage, 2)
            entries = build_model(config, placement).entries()
            assert not kept or entries.keys() == kept.keys()
            for tensor_name, entry in entries.items():
                mark = kept.setdefault(tensor_name, torch.zeros(entry.shape, dtype=torch.bool))
                for part in entry.parts:
                    assert mark[part.index].shape == part.target.shape
                    mark[part.index] = True
    assert all(mark.all() for mark in kept.values())
