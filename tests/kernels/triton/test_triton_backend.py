"""The Triton kernels together: a whole model, as the engine runs it, in Triton's interpreter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import pack_output_scales, widen
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import decode_attention, linear
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.placement import Placement
from nanocore.worker.sampling.columns import SamplingMetadata
from nanocore.worker.step import step_graphs
from tests.fake_device import FakeGraphRecorder
from tests.model_families import BUILDERS, greedy_continuations
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import Engine, Wish, expected, load_model, make_wishes
from tests.worker.running import make_runner, run_runner, write_script

# What is infinite on a GPU without a word, numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    model = load_model(make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16))
    model.layers = model.layers[:2]  # for time
    return model


@pytest.mark.campaign
@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_model_says_with_it_what_it_says_with_torch(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    """Chunks, mixed steps and decodes, as graphs and not, two steps in flight."""
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8,))
    monkeypatch.setattr(step_graphs, "decode_sizes", lambda largest: [2, largest])
    wishes = make_wishes(3, 12, 20)
    graph_capture = FakeGraphRecorder()
    kernels = TritonKernels(CPU, batch_invariant)
    engine = Engine(model, 2, graph_capture, budget=14, kernels=kernels)
    assert engine.run(wishes) == expected(model, wishes)
    assert graph_capture.num_replays > 0
    assert graph_capture.num_replays < engine.scheduler.counters.num_steps  # some were too large


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", ["gpt2", "granite", "lfm2", "mixtral", "olmo2", "qwen35_square", "smollm3"]
)
def test_families_with_parts_of_their_own_say_it_too(name: str, tmp_path: Path) -> None:
    model = load_model(BUILDERS[name](tmp_path))
    model.layers = model.layers[:2]  # for time
    wishes = make_wishes(44, max_tokens=2)  # past the window
    engine = Engine(model, 1, kernels=TritonKernels(CPU))
    assert engine.run(wishes) == expected(model, wishes)


@pytest.mark.campaign
def test_float16_rounds_as_torch_does(tmp_path: Path) -> None:
    folder = BUILDERS["qwen2_moe"](tmp_path)
    prompts = [[7, 30, 200], list(range(60, 72))]
    exact = greedy_continuations(folder, prompts, 2)
    script = write_script(prompts, [said.token_ids for said in exact])
    placement = Placement(torch.float16, CPU)

    def logits(kernels: Kernels) -> Tensor:
        samples = run_runner(make_runner(folder, placement, kernels=kernels), script)
        return torch.stack([s.logits_V for s in samples]).float()

    samples = [pair for step in script.samples for pair in step.values()]
    expected_SV = torch.stack([exact[i].logits_TV[t] for i, t in samples])
    differences = [
        (logits(kernels) - expected_SV).square().mean().sqrt()
        for kernels in (TritonKernels(CPU), TorchKernels())
    ]
    assert 0 < differences[0] < 1.25 * differences[1]
    assert differences[1] < 0.02


class Launches(TorchDispatchMode):
    """Counts operations of torch that launch a kernel, outside of Triton's own."""

    FREE = (
        "view", "reshape", "slice", "select", "as_strided", "empty", "expand", "transpose", "t",
        "unsqueeze", "squeeze", "split", "detach", "alias", "unbind", "permute", "new_empty",
        "empty_like", "empty_strided", "_unsafe_view", "unflatten", "flatten", "lift_fresh",
        "detach_", "chunk",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        result = func(*args, **(kwargs or {}))
        is_free = name in self.FREE or (name == "to" and result is args[0])
        if not self.is_inside and not is_free:
            self.names.append(name)
        return result


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    call = GridExecutor.__call__

    def counted(executor: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        launches.names.append(executor.fn.__name__)
        launches.is_inside = True
        try:
            return call(executor, *args, **kwargs)
        finally:
            launches.is_inside = False

    with monkeypatch.context() as patch, launches:
        patch.setattr(GridExecutor, "__call__", counted)
        yield launches


@pytest.mark.parametrize(
    ("is_few", "is_large", "num_launches"),
    [
        (False, False, 8),
        pytest.param(True, False, 9, marks=pytest.mark.campaign),
        pytest.param(True, True, 10, marks=pytest.mark.campaign),
    ],
)
def test_a_decode_step_launches_few_kernels_a_layer_and_one_plan(
    model: DecoderModel,
    monkeypatch: pytest.MonkeyPatch,
    is_few: bool,
    is_large: bool,
    num_launches: int,
) -> None:
    """Parts of few sequences are merged by a kernel of its own, which others do without."""
    kernels = TritonKernels(CPU)
    monkeypatch.setattr(decode_attention, "FEW_SEQS", 8 if is_few else 0)
    if is_large:  # products and their gate are two launches
        monkeypatch.setattr(linear, "FUSED_GATE_TOKENS", 0)
    engine = Engine(model, 1, kernels=kernels)
    engine.scheduler.add(make_wishes(5, max_tokens=9)[0].request(0))
    engine.deliveries.take(engine.scheduler, engine.runner.execute(engine.scheduler.schedule()))
    counts = []
    layers = model.layers
    for num_layers in (2, 1):
        monkeypatch.setattr(model, "layers", layers[:num_layers])
        stage = engine.runner.stage
        monkeypatch.setattr(stage, "kv_caches", stage.kv_caches[:num_layers])
        with counting(monkeypatch) as launches:
            engine.deliveries.take(
                engine.scheduler, engine.runner.execute(engine.scheduler.schedule())
            )
        counts.append(Counter(launches.names))
    layer = counts[0] - counts[1]
    assert layer["merge_parts_kernel"] == int(is_few)
    assert layer.total() == num_launches, layer
    assert [count["decode_plan_kernel"] for count in counts] == [1, 1]


def count_decode_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> Counter[str]:
    runner, sampler, names = engine.runner, engine.runner.sampler, []
    assert sampler is not None
    begin_step, sample_plain, counter = runner.model.begin_step, sampler.sample_plain, ExitStack()

    def begin(*args: Any) -> Any:
        launches = counter.enter_context(counting(monkeypatch))
        counter.callback(lambda: names.extend(launches.names))
        return begin_step(*args)

    def end(*args: Any) -> Any:
        with counter:
            return sample_plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "begin_step", begin)
        patch.setattr(sampler, "sample_plain", end)
        patch.setattr(runner.model, "layers", runner.model.layers[:num_layers])
        patch.setattr(runner.stage, "kv_caches", runner.stage.kv_caches[:num_layers])
        engine.deliveries.take(engine.scheduler, runner.execute(engine.scheduler.schedule()))
    return Counter(names)


@pytest.mark.campaign
@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_outside_its_layers_a_decode_step_launches_six_kernels(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    engine = Engine(model, 1, kernels=TritonKernels(CPU, batch_invariant))
    for handle, wish in enumerate(make_wishes(6, 5, max_tokens=9)):
        engine.scheduler.add(wish.request(handle))
    engine.deliveries.take(engine.scheduler, engine.runner.execute(engine.scheduler.schedule()))
    two, one = (count_decode_step(engine, monkeypatch, n) for n in (2, 1))
    product = "linear_kernel" if batch_invariant else "linear"
    assert one - (two - one) == Counter(
        [
            "begin_step_kernel",
            "attention_plan_kernel" if batch_invariant else "decode_plan_kernel",
            "rms_norm_kernel",
            product,
            "best_of_part_kernel",
            "best_of_parts_kernel",
        ]
    )


@pytest.mark.campaign
def test_experts_are_routed_and_laid_out_by_a_kernel_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load_model(BUILDERS["qwen2_moe"](tmp_path)), 1, kernels=TritonKernels(CPU))
    engine.scheduler.add(make_wishes(5, max_tokens=9)[0].request(0))
    engine.deliveries.take(engine.scheduler, engine.runner.execute(engine.scheduler.schedule()))
    two, one = (count_decode_step(engine, monkeypatch, n) for n in (2, 1))
    sparse = two - one  # every other layer is
    assert sparse["route_kernel"] == sparse["plan_kernel"] == sparse["weighted_sum_kernel"] == 1
    assert sparse["grouped_kernel"] == 2
    # QKV, output, the router, the shared expert's gate and its second product.
    torch_names = {name for name in sparse if not name.endswith("_kernel")}
    assert sum(sparse[name] for name in torch_names) == 5, sparse


@pytest.mark.parametrize("rows", [1, 65])
def test_an_fp8_layer_is_two_kernels_and_nothing_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    kernels, x = TritonKernels(CPU), torch.ones(rows, 32)
    weight = kernels.pack_linear(torch.ones(64, 32), "fp8")
    with counting(monkeypatch) as launches:
        kernels.linear(x, weight)
        assert Counter(launches.names) == Counter(["quantize_tokens_kernel", "_scaled_mm"])
        launches.names.clear()
        kernels.gated_linear(x, weight)
    needed = ["quantize_tokens_kernel", "_scaled_mm", "gated_kernel"]
    assert Counter(launches.names) == Counter(needed)


def sampled_logits(
    model: DecoderModel, wishes: list[Wish], budget: int, kernels: TritonKernels
) -> dict[tuple[int, int], Tensor]:
    engine = Engine(model, 1, budget=budget, kernels=kernels)
    assert engine.runner.sampler is not None
    sample = engine.runner.sampler.sample
    logits: dict[tuple[int, int], Tensor] = {}

    def recording(logits_SV: Tensor, sampling: SamplingMetadata, mask: TokenMask | None) -> Tensor:
        noise = sampling.noise
        keys = zip(noise.seed_R.tolist(), noise.position_R.tolist(), strict=True)
        logits.update({key: row.clone() for key, row in zip(keys, logits_SV, strict=True)})
        return sample(logits_SV, sampling, mask)

    engine.runner.sampler.sample = recording  # type: ignore[method-assign]
    engine.run(wishes)
    return logits


@pytest.mark.campaign
@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("batch_invariant", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_batch_invariant_logits_are_the_same_bits_alone_in_a_crowd_and_in_chunks(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    monkeypatch.setattr(model, "layers", model.layers[:1])  # for time
    kernels = TritonKernels(CPU, batch_invariant)
    wishes = make_wishes(4, 13, max_tokens=2)
    crowd = sampled_logits(model, wishes, budget=48, kernels=kernels)
    chunks = sampled_logits(model, wishes, budget=7, kernels=kernels)
    differ = sum(not torch.equal(crowd[key], chunks[key]) for key in crowd)
    alone = Engine(model, 1, kernels=kernels)
    assert alone.runner.sampler is not None
    for handle in range(1, len(wishes)):
        empty = [Wish([1], 1)] * handle  # so that the handle, and with it the seed, is the same
        for key, row in sampled_logits(model, [*empty, wishes[handle]], 48, kernels).items():
            if key[0] == handle:
                differ += not torch.equal(row, crowd[key])
    assert crowd.keys() == chunks.keys()
    assert (differ == 0) == batch_invariant


def test_without_cuda_it_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"the device is cpu.*use auto"):
        select_kernels("triton", CPU)


@pytest.mark.parametrize(
    ("capability", "found", "name", "words"),
    [
        ((9, 0), True, "triton", ""),
        ((7, 5), True, "torch", "older than Ampere"),
        ((9, 0), False, "torch", "triton is not installed"),
    ],
)
def test_on_cuda_it_is_taken_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    found: bool,
    name: str,
    words: str,
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if not found:
        monkeypatch.setitem(sys.modules, "triton", None)
    properties = SimpleNamespace(multi_processor_count=132, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert select_kernels("auto", cuda).name == name
    assert words in caplog.text
    if name == "torch":
        with pytest.raises(ValueError, match=words):
            select_kernels("triton", cuda)


def test_int8_weights_give_what_the_reference_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 40, generator=generator) for rows in (3, 48))
    reference, kernels = select_kernels("torch", CPU), select_kernels("triton", CPU)
    ours = kernels.pack_linear(weight.clone(), "int8")  # a scale for each output
    packed = pack_output_scales(weight)
    theirs = reference.pack_linear(widen(packed.data, packed.scale_O))

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)

    check(kernels.linear(x, ours), reference.linear(x, theirs))
    check(kernels.gated_linear(x, ours), reference.gated_linear(x, theirs))
    check(kernels.logits(x, ours), reference.logits(x, theirs))
