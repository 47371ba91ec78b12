"""Steps captured once: the same bits as kernels called one by one, or no capturing at all."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.attention_step import make_inputs
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.program import (
    SAMPLES,
    TOKENS,
    NotCapturable,
    ProgramCapture,
)
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.step import Replay, StepInputs
from tests.kernels.cpu_case import PagedCase
from tests.kernels.layered_cache import layered, parts

HIDDEN, VOCAB = 40, 50
MAX_TOKENS, MAX_SAMPLES = 64, 8


class TinyStep:
    """Every kernel once, as a model would call them."""

    def __init__(self, kernels: CpuKernels, case: PagedCase, quantization: bool) -> None:
        self.kernels, self.case = kernels, case
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        kind = "int8" if quantization else None
        heads = case.num_heads * case.head_dim
        width = heads + 2 * case.num_kv_heads * case.head_dim
        self.vocabulary = kernels.pack_linear(draw(VOCAB, HIDDEN), kind)
        self.qkv = kernels.pack_linear(0.2 * draw(width, HIDDEN), kind)
        self.o = kernels.pack_linear(0.1 * draw(HIDDEN, heads), kind)
        # The gate is a kernel of its own behind the first, and within the second.
        self.ups = [kernels.pack_linear(0.2 * draw(2 * size, HIDDEN), kind) for size in (30, 32)]
        self.downs = [kernels.pack_linear(0.2 * draw(HIDDEN, size), kind) for size in (30, 32)]
        self.weight, self.bias = draw(HIDDEN), draw(width)
        _, self.qk_norm, self.rotary, self.table = case.inputs()
        self.cache = case.make_cache(case.dtype)

    def __call__(self, inputs: StepInputs) -> Tensor:
        kernels, case = self.kernels, self.case
        embedding = TokenEmbedding(self.vocabulary, 0, 1.5, case.dtype)
        begun = kernels.begin_step(inputs.rows, embedding)
        residual, metadata = begun.x_TE, inputs.attention(begun)[self.cache.group]
        assert residual is not None
        x = kernels.rms_norm(residual, self.weight, 1e-6)
        qkv = kernels.linear(x, self.qkv, self.bias)
        q = kernels.rope_and_store_kv(
            qkv, case.num_heads, self.qk_norm, self.rotary, self.cache, metadata
        )
        out = kernels.paged_attention(q, self.cache, metadata, case.spec)
        x, residual = kernels.add_rms_norm(
            kernels.linear(out.flatten(1), self.o), residual, self.weight, 1e-6
        )
        x = kernels.linear(kernels.gated_linear(x, self.ups[0]), self.downs[0])
        x, residual = kernels.add_rms_norm(x, residual, self.weight, 1e-6)
        x = kernels.gated_linear(x, self.ups[1], activation="gelu")
        x = kernels.linear(x, self.downs[1])
        x = kernels.select_add_rms_norm(x, residual, inputs.sample_index_R, self.weight, 1e-6)
        return kernels.logits(x, self.vocabulary, 30.0)

    def run(self, compute: Replay, appended: Tensor | None = None) -> list[Tensor]:
        """Logits of the case's steps. appended: the whole table, of which a step gets blocks."""
        for part in parts(self.cache):
            part.zero_()
        said, table = [], self.table if appended is None else appended
        for step in range(self.case.num_steps):
            _, metadata = self.case.metadata(step, table, keeps_empty=True)
            num_tokens = len(metadata.positions_T)
            token_ids = (torch.arange(num_tokens) * 7 + step) % VOCAB
            sampled = torch.tensor(sorted({end - 1 for end in metadata.query_start[1:]} - {-1}))
            inputs = make_inputs(token_ids, metadata, sampled)
            if appended is not None:
                row_W, column_W = (index.flatten() for index in appended.nonzero().unbind(1))
                rows = replace(
                    inputs.rows,
                    block_tables=self.table,
                    block_rows_W=row_W,
                    block_columns_W=column_W,
                    block_ids_W=appended[row_W, column_W],
                )
                inputs = replace(inputs, rows=rows)
            said.append(compute(inputs).clone())
        return said


@pytest.mark.parametrize("quantization", [False, True], ids=["plain", "int8 and int8 KV"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_is_the_kernels_called_one_by_one(
    kernels: CpuKernels, dtype: torch.dtype, quantization: bool
) -> None:
    counts = [(20, 1, 1, 30), (1, 1, 1, 1), (33, 1, 0, 7), (0, 5, 1, 1)]
    case = PagedCase(
        counts, rotary_dim=16, has_qk_norm=True, window=25, softcap=5.0, num_padding=2, dtype=dtype,
        is_quantized=quantization,
    )  # fmt: skip
    step = TinyStep(kernels, case, quantization)
    one_by_one = step.run(step)
    replay = kernels.capture(step, MAX_TOKENS, MAX_SAMPLES)
    assert replay is not None
    for actual, expected in zip(step.run(replay), one_by_one, strict=True):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)
    for actual, expected in zip(step.run(replay), one_by_one, strict=True):
        assert torch.equal(actual, expected)  # nothing is left over from the first time


def test_a_step_without_samples_says_nothing(kernels: CpuKernels) -> None:
    step = TinyStep(kernels, PagedCase([(20,)]), quantization=False)
    replay = kernels.capture(step, MAX_TOKENS, MAX_SAMPLES)
    assert replay is not None
    _, metadata = step.case.metadata(0, step.table, keeps_empty=True)
    token_ids = torch.zeros(20, dtype=torch.int64)
    out = replay(make_inputs(token_ids, metadata, torch.empty(0, dtype=torch.int64)))
    assert out.shape == (0, VOCAB)
    assert step.cache.v_NSKD.any()


def test_appended_blocks_are_in_the_table_before_a_step_reads_it(kernels: CpuKernels) -> None:
    step = TinyStep(kernels, PagedCase([(20, 1), (5, 1)]), quantization=False)
    replay = kernels.capture(step, MAX_TOKENS, MAX_SAMPLES)
    assert replay is not None
    expected = step.run(replay)
    table = step.table.clone()
    for compute in (step, replay):
        step.table.zero_()
        actual = step.run(compute, appended=table)
        assert torch.equal(step.table, table)
        assert all(map(torch.equal, actual, expected))


def test_a_captured_step_without_an_embedding_reads_no_token_ids(kernels: CpuKernels) -> None:
    weight, hidden = torch.ones(8), torch.arange(32.0).view(4, 8)

    def compute(inputs: StepInputs) -> Tensor:
        assert kernels.begin_step(inputs.rows, None).x_TE is None
        return kernels.rms_norm(hidden, weight, 1e-6)

    replay = kernels.capture(compute, 4, 4)
    assert replay is not None
    _, metadata = PagedCase([(3,)]).metadata(0, torch.zeros(1, 1, dtype=torch.int32), True)
    inputs = make_inputs(torch.zeros(3, dtype=torch.int64), metadata)
    inputs = replace(inputs, rows=replace(inputs.rows, token_table=None))
    assert torch.equal(replay(inputs), compute(inputs)[:3])


TORCH_OPERATIONS: list[Callable[[Tensor], object]] = [
    lambda x: x + 1,
    lambda x: x.add_(1),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: x[0].copy_(x[1]),
    lambda x: x.mean(),
    lambda x: x[0, 0].item(),
    lambda x: x.to(torch.float64),
    lambda x: torch.cat((x, x)),
    lambda x: torch.zeros(3),
    lambda x: torch.mul(x, 2, out=x),
    lambda x: x.T.contiguous(),
]


@pytest.mark.parametrize("operation", TORCH_OPERATIONS)
def test_an_operation_of_torch_is_not_recorded(
    kernels: CpuKernels, operation: Callable[[Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(8)

    def compute(inputs: StepInputs) -> Tensor:
        x = kernels.begin_step(inputs.rows, TokenEmbedding(packed, 0, 1.0, torch.float32)).x_TE
        assert x is not None
        operation(x)
        return kernels.rms_norm(x, weight, 1e-6)

    packed = kernels.pack_linear(torch.ones(4, 8))
    caplog.set_level(logging.INFO)
    assert kernels.capture(compute, 4, 4) is None
    assert "no graphs are captured, because a step has torch's" in caplog.text
    # The backend is as it was.
    assert torch.equal(kernels.rms_norm(torch.ones(1, 8), weight, 0.0), torch.ones(1, 8))


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("this KV cache", lambda k, x: k.rope_and_store_kv(x, 1, None, None, SMALL_BLOCKS, None)),
        ("this KV cache", lambda k, x: k.paged_attention(x, SMALL_BLOCKS, None, None)),
    ],
)
def test_what_is_left_to_torch_is_not_recorded(
    kernels: CpuKernels,
    what: str,
    call: Callable[[CpuKernels, Tensor], Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert kernels.capture(lambda inputs: call(kernels, inputs.sample_index_R), 4, 4) is None
    assert f"because a step has {what}" in caplog.text


SMALL_BLOCKS = layered(torch.zeros(2, 8, 1, 16), torch.zeros(2, 8, 1, 16))


def test_views_are_recorded(kernels: CpuKernels) -> None:
    packed, weight = kernels.pack_linear(torch.arange(32.0).view(4, 8)), torch.ones(4)

    def compute(inputs: StepInputs) -> Tensor:
        x = kernels.begin_step(inputs.rows, TokenEmbedding(packed, 0, 1.0, torch.float32)).x_TE
        assert x is not None
        first, _ = x.chunk(2, dim=1)
        return kernels.rms_norm(first.unflatten(1, (1, 4)).flatten(1), weight, 0.0)

    replay = kernels.capture(compute, 4, 4)
    assert replay is not None
    _, metadata = PagedCase([(2,)]).metadata(0, torch.zeros(1, 1, dtype=torch.int32), True)
    inputs = make_inputs(torch.tensor([3, 1]), metadata)
    assert torch.equal(replay(inputs), compute(inputs))


def captured(
    kernels: CpuKernels, max_tokens: int, run: Callable[[ProgramCapture], Tensor]
) -> Tensor:
    """What is captured of steps of at most four samples."""
    with ProgramCapture(kernels.workspace, max_tokens, 4) as capturing:
        return run(capturing)


def test_memory_is_used_again_once_no_view_is_left(kernels: CpuKernels) -> None:
    addresses = []

    def run(capturing: ProgramCapture) -> Tensor:
        for _ in range(10):
            result = capturing.empty(8, torch.float32)
            addresses.append(result.data_ptr())
        return result

    captured(kernels, 4, run)
    # A result is let go of when its name gets the next one.
    assert len(set(addresses)) == 2


def test_memory_is_not_used_again_while_a_view_lives(kernels: CpuKernels) -> None:
    def run(capturing: ProgramCapture) -> Tensor:
        kept = [capturing.empty(8, torch.float32)[1:, 2:].unflatten(1, (2, 3)) for _ in range(5)]
        ranges = sorted(
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in kept
        )
        for (start, num_bytes), (following, _) in itertools.pairwise(ranges):
            assert start + num_bytes <= following
        freed = kept.pop(2).untyped_storage().data_ptr()
        assert capturing.empty(8, torch.float32).untyped_storage().data_ptr() == freed
        # Another number of bytes never shares, nor do other rows.
        assert capturing.empty(4, torch.float32).untyped_storage().data_ptr() != freed
        return kept[0]

    captured(kernels, 4, run)


def test_a_recording_has_fewer_buffers_than_results(kernels: CpuKernels) -> None:
    step = TinyStep(kernels, PagedCase([(20,)]), quantization=False)
    buffers, results = set(), []
    empty = ProgramCapture.empty

    def counted(capturing: ProgramCapture, width: int, dtype: torch.dtype) -> Tensor:
        result = empty(capturing, width, dtype)
        buffers.add(result.untyped_storage().data_ptr())
        results.append(width)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramCapture, "empty", counted)
        assert kernels.capture(step, MAX_TOKENS, MAX_SAMPLES) is not None
    assert len(buffers) < len(results) - 3


def test_rows_of_a_recording_are_the_most_a_step_can_have(kernels: CpuKernels) -> None:
    def run(capturing: ProgramCapture) -> Tensor:
        assert capturing.rows == TOKENS
        assert capturing.empty(3, torch.bfloat16).shape == (9, 3)
        capturing.rows = SAMPLES
        return capturing.empty(3, torch.float32)

    assert captured(kernels, 9, run).shape == (4, 3)


def test_the_refusal_names_the_operation(kernels: CpuKernels) -> None:
    with pytest.raises(NotCapturable, match=r"torch's .*mean"):
        captured(kernels, 4, lambda capturing: capturing.empty(3, torch.float32).mean())
