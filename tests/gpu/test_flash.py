"""FlashAttention on a CUDA device: beside dense attention, torch's backend, and its own graphs.

Of an installation, or by the stand-in in benchmarks/gpu/stand_ins over a library that was carried,
in the folder that NANOCORE_GPU_BENCHMARK_CARRIED names. To be run with TRITON_INTERPRET=0, see
`tests/conftest.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import fa3
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.flash_backend import FlashKernels
from nanocore.worker.step.cuda_stream import CudaGraphCapture
from tests.gpu.targets import CUDA_MARKS, Target
from tests.gpu.tensors import DEVICE, DTYPE, close, there
from tests.kernels.layered_cache import layered, parts
from tests.kernels.triton.paged_step import Heads, PagedStep, draw_step
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import BLOCK_SIZE, make_wishes

pytestmark = CUDA_MARKS
STAND_INS = Path(fa3.__file__).parent / "stand_ins"


@pytest.fixture(scope="module")
def kernels() -> Iterator[FlashKernels]:
    with pytest.MonkeyPatch.context() as patch:
        is_carried = bool(os.environ.get(fa3.FOLDER_VARIABLE))
        if is_carried and importlib.util.find_spec("flash_attn_interface") is None:
            patch.syspath_prepend(str(STAND_INS))
        try:
            yield FlashKernels(DEVICE)
        except ValueError as error:
            pytest.skip(str(error))


@dataclass(frozen=True)
class Layer:
    """A layer of a step on the device. reference: dense attention, [T, H, D] in float64."""

    q_THD: Tensor
    cache: KVCache
    metadata: AttentionMetadata
    spec: AttentionSpec
    reference: Tensor

    @classmethod
    def of(cls, step: PagedStep, kernels: FlashKernels) -> Layer:
        """Unused slots hold large numbers: that they are not read shows without NaN, too."""
        if step.block_size % kernels.block_multiple:
            step = replace(step, block_size=kernels.block_multiple)
        k, v = (there(x, DTYPE).nan_to_num(nan=50.0) for x in parts(step.cache))
        q_THD, reference = there(step.q_THD(), DTYPE), there(step.expected())
        return cls(q_THD, layered(k, v), there(step.metadata), step.spec, reference)

    def attend(self, kernels: TorchKernels) -> Tensor:
        return kernels.paged_attention(self.q_THD, self.cache, self.metadata, self.spec)


WIDE, GROUPED, LARGE = Heads(16, 8, 128), Heads(32, 4, 64), Heads(8, 4, 256)
MIXED = [50] * 9, [(2000, 20), (300, 300)]
STEPS: dict[str, Callable[[], PagedStep]] = {
    "decodes": partial(draw_step, WIDE, [1, 70, 300, 9, 64], block_size=64),
    "one long": partial(draw_step, WIDE, [9000] + [40] * 70, block_size=64),
    "chunks": partial(draw_step, WIDE, [], [(200, 200), (333, 77), (64, 1)], block_size=16),
    "mixed": partial(draw_step, GROUPED, *MIXED, block_size=64),
    "wide blocks": partial(draw_step, WIDE, [700, 30], [(900, 300)], block_size=128),
    "window": partial(draw_step, GROUPED, *MIXED, window=40, block_size=64),
    "softcap": partial(draw_step, LARGE, [700, 30], [(400, 300)], softcap=30.0, block_size=32),
    "odd": partial(
        draw_step, Heads(10, 2, 96), [77, 500], [(130, 60)], block_size=16, num_padding=3
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_attention(kernels: FlashKernels, name: str) -> None:
    layer = Layer.of(STEPS[name](), kernels)
    with torch.inference_mode():
        outputs = [layer.attend(kernels) for _ in range(3)]
        close(layer.attend(TorchKernels()), layer.reference)
    for out in outputs:
        close(out, layer.reference)
        assert torch.equal(out, outputs[0])


def test_layers_of_two_kinds_do_not_disturb_each_other(kernels: FlashKernels) -> None:
    layer, narrow = (Layer.of(STEPS[name](), kernels) for name in ("mixed", "window"))
    with torch.inference_mode():
        for _ in range(2):
            close(layer.attend(kernels), layer.reference)
            close(replace(layer, spec=narrow.spec).attend(kernels), narrow.reference)


@dataclass(frozen=True)
class Outputs:
    """Of two layers of a step."""

    first_THD: Tensor
    second_THD: Tensor


def test_a_graph_of_decodes_replays_other_lengths(kernels: FlashKernels) -> None:
    """Recorded when all rows are padding, as an engine records it; work is dealt out anew."""
    lengths = [1, 3000, 300, 64]
    layer = Layer.of(draw_step(WIDE, [max(lengths)] * len(lengths), block_size=64), kernels)
    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()

    def work() -> Outputs:
        fresh = replace(layer, metadata=replace(layer.metadata))  # it has no scratch yet
        return Outputs(fresh.attend(kernels).float(), fresh.attend(kernels).float())

    with torch.inference_mode():
        layer.metadata.seq_lens_B.zero_()
        outputs, replay = graph_capture.capture(work)
        for own in (lengths, lengths[::-1]):
            layer.metadata.seq_lens_B.copy_(torch.tensor(own))
            replay()
            by_torch = replace(layer, metadata=replace(layer.metadata, seq_lens=own))
            for out in (outputs.first_THD, outputs.second_THD):
                close(out, by_torch.attend(TorchKernels()).float())


def test_graphs_of_decodes_give_the_tokens_of_eager_steps(
    kernels: FlashKernels, tmp_path: Path
) -> None:
    if BLOCK_SIZE % kernels.block_multiple:
        pytest.skip(f"blocks of {BLOCK_SIZE} tokens")
    folder = make_tiny_qwen3(tmp_path, head_dim=64, dtype=DTYPE)
    target = Target("cuda", lambda: kernels)
    wishes = make_wishes(12, 5, 20, 9, max_tokens=20)
    eager, recorded = (
        target.engine(target.load(folder, DTYPE), has_graphs=has_graphs).run(wishes)
        for has_graphs in (False, True)
    )
    assert recorded == eager
    assert {len(tokens) for tokens in eager.values()} == {20}
