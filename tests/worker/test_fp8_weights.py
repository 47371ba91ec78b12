"""--quantization fp8: what a whole model says, what of it is quantized, where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanocore.engine_core.config import EngineConfig
from nanocore.kernels.grouped_weight import CheckpointWeight
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.linear_weight import FP8, LinearWeight
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker import devices
from nanocore.worker.cost.rank_cost import rank_cost
from nanocore.worker.devices import check_quantized_linear
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.worker import Worker
from tests.kernels.fp8_numbers import rounded
from tests.model_families import BUILDERS, greedy_continuations
from tests.worker.configs import make_worker_config
from tests.worker.filling import fill_with
from tests.worker.running import make_runner, run_runner, write_script

# What is infinite on a GPU without a word, numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
PLACEMENT = Placement(torch.float32, CPU)
PROMPTS = [[5, 80, 200], list(range(40, 49))]


class RoundedKernels(TorchKernels):
    """Layers of float64 numbers that were looked up among those of E4M3."""

    name = "rounded"

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        if quantization is None:
            return super().pack_linear(weight)
        assert isinstance(weight, Tensor)
        return LinearWeight(*weight.shape, FP8, rounded(weight))

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        if weight.dtype != FP8:
            return super().linear(x_TI, weight, bias_O)
        y_TO = rounded(x_TI) @ weight.data.t()
        return (y_TO if bias_O is None else y_TO + bias_O).to(x_TI.dtype)


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases and a tied head, and one with experts."""
    return BUILDERS[request.param](tmp_path_factory.mktemp("model"))


def logits(folder: Path, kernels: Kernels, quantization: Quantization | None) -> Tensor:
    exact = greedy_continuations(folder, PROMPTS, 2)
    script = write_script(PROMPTS, [said.token_ids for said in exact])
    runner = make_runner(folder, PLACEMENT, kernels=kernels, quantization=quantization)
    return torch.stack([sample.logits_V for sample in run_runner(runner, script)])


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=pytest.mark.campaign)])
def test_a_model_says_what_its_rounded_weights_and_activations_say(folder: Path, name: str) -> None:
    exact = logits(folder, TorchKernels(), None)
    expected = logits(folder, RoundedKernels(), "fp8")
    actual = logits(folder, select_kernels(name, CPU), "fp8")

    def error(x: Tensor, y: Tensor) -> float:
        return float((x - y).norm() / y.norm())

    # An activation that lies between two numbers may go to either, by how its sum was rounded.
    assert error(actual, expected) < 0.005
    assert 0.01 < error(actual, exact) < 0.3


def test_the_two_ends_routers_and_experts_stay_as_they_are(folder: Path) -> None:
    runner = make_runner(folder, PLACEMENT, kernels=TorchKernels(), quantization="fp8")
    layer = runner.model.layers[0]
    assert layer.mixer.qkv_proj.weight.packed.dtype == FP8
    assert layer.mixer.o_proj.weight.packed.dtype == FP8
    assert runner.model.head is not None
    assert runner.model.head.weight.packed.dtype == torch.float32
    assert runner.model.embedding is not None
    assert runner.model.embedding.weight.packed.dtype == torch.float32
    mlp = layer.mlp
    if hasattr(mlp, "router"):
        assert mlp.router.weight.packed.dtype == mlp.experts.gate_up_XIE.dtype == torch.float32
    else:
        assert mlp.in_proj.weight.packed.dtype == mlp.down_proj.weight.packed.dtype == FP8


def test_a_check_reckons_with_the_bytes_that_an_engine_has(folder: Path) -> None:
    config = make_worker_config(folder=str(folder), quantization="fp8")
    model_config = load_model_config(folder)
    kernels = TritonKernels(CPU)
    plain, quantized = (
        fill_and_pack(build_model(model_config, PLACEMENT), kernels, fill_with(1), quantization)
        for quantization in (None, "fp8")
    )
    assert quantized < plain
    outline = build_model(model_config, PLACEMENT.on_meta())
    layout = KVLayout(outline.cache_specs, kv_cache_format("auto", torch.float32, "cpu"), 16)
    assert rank_cost(outline, layout, config, kernels).held_bytes == quantized


def test_it_is_refused_where_it_cannot_be_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_worker_config(folder=str(folder), quantization="fp8", device="cpu")
    with pytest.raises(ConfigError, match=r"--quantization fp8 needs CUDA; on a CPU int8 needs"):
        Worker(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    cuda = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"fp8: cuda:0 has no fp8 \(compute capability 8\.9\)"):
        check_quantized_linear("fp8", TorchKernels(), torch.bfloat16, cuda)
    check_quantized_linear("int8", TorchKernels(), torch.bfloat16, cuda)
    with pytest.raises(ConfigError, match=r"--quantization fp8: .*leave --batch-invariant out"):
        EngineConfig(quantization="fp8", batch_invariant=True)
    native = select_kernels("cpu", CPU)
    with pytest.raises(ValueError, match="unknown quantization 'fp8'; known: int8"):
        native.pack_linear(torch.zeros(16, 16), "fp8")


class WithoutProduct(TorchKernels):
    """As on a GPU for which torch has none."""

    def __init__(self, text: str) -> None:
        self.text = text

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        raise RuntimeError(self.text)


def test_a_product_is_tried_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's has been missing on some GPUs that have fp8, and for some dtypes."""
    monkeypatch.setattr(devices, "require_fp8", lambda *_: None)
    for kernels in (TorchKernels(), TritonKernels(CPU)):
        check_quantized_linear("fp8", kernels, torch.float16, CPU)
    kernels = WithoutProduct("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling\nmore")
    with pytest.raises(
        ConfigError, match=r"no such product of float16 \(CUDA error: CUBLAS"
    ) as told:
        check_quantized_linear("fp8", kernels, torch.float16, CPU)
    assert "int8 needs as little memory, or try --dtype bfloat16" in str(told.value)
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_quantized_linear("fp8", WithoutProduct("CUDA out of memory."), torch.float16, CPU)
