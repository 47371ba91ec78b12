"""On a CUDA device: each Triton kernel in bfloat16, as it is compiled there, beside the reference.

The reference is torch's backend, on the same device and in float32. To be run with
TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from nanocore.kernels.attention import KVCache, QKNorm, Rotary
from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import StackedExperts, TokenEmbedding
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Filters, Noise, TokenPlaces
from nanocore.kernels.step import StepRows
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.paged_attention import paged_attention
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.gpu.targets import CUDA_MARKS
from tests.gpu.tensors import DEVICE, DTYPE, MAX_ERROR, close, there
from tests.kernels.drawn_weights import draw_float8, draw_groups
from tests.kernels.layered_cache import layered, parts
from tests.kernels.triton.paged_step import Heads, PagedStep, draw_step

pytestmark = CUDA_MARKS

REFERENCE = TorchKernels()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(DEVICE)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype or DTYPE)


@pytest.mark.parametrize(("rows", "size"), [(300, 128), (7, 2304), (1, 16384)])
def test_norms(kernels: TritonKernels, rows: int, size: int) -> None:
    x, y, weight = draw(rows, size), draw(rows, size, seed=1), draw(size, seed=2)
    close(kernels.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x.float(), weight.float(), 1e-6))
    expected, sums = REFERENCE.add_rms_norm(x.float(), y.float(), weight.float(), 1e-6)
    index = torch.tensor([rows - 1, 0, 0], device=DEVICE)
    close(kernels.select_add_rms_norm(x, y, index, weight, 1e-6), expected[index])
    for actual, wanted in zip(
        kernels.add_rms_norm(x, y, weight, 1e-6), (expected, sums), strict=True
    ):
        close(actual, wanted)


@pytest.mark.parametrize(
    ("rows", "quantization", "outs", "ins"),
    [
        (1, None, 6144, 1024),
        (17, None, 2880, 896),
        (48, None, 6144, 1024),
        (64, None, 24576, 4096),
        (300, None, 6144, 1024),
        (1, "int8", 6144, 1024),
        (48, "int8", 6144, 1024),
        (48, "int8", 24576, 4096),
        (300, "int8", 2880, 896),
        (1, "int4", 6144, 1024),
        (48, "int4", 6144, 1024),
        (300, "int4", 2880, 896),
    ],
)
def test_products(
    kernels: TritonKernels, rows: int, quantization: str | None, outs: int, ins: int
) -> None:
    x, bias = draw(rows, ins), draw(outs)
    plain = draw(outs, ins, seed=1) * ins**-0.5
    exact = weight = kernels.pack_linear(plain, quantization)
    if quantization != "int8":
        exact = REFERENCE.pack_linear(plain.float(), quantization)
    expected = REFERENCE.linear(x.float(), exact, bias.float())
    close(kernels.linear(x, weight, bias), expected)
    close(kernels.logits(x, weight), REFERENCE.logits(x.float(), exact))
    gated = REFERENCE.gated_linear(x.float(), exact, bias.float(), "gelu")
    close(kernels.gated_linear(x, weight, bias, "gelu"), gated)


@pytest.mark.parametrize("rows", [1, 40, 300, 1500])
@pytest.mark.parametrize("form", ["groups of 128", "permuted", "super", "8 bits, super"])
def test_products_of_grouped_weights(kernels: TritonKernels, form: str, rows: int) -> None:
    weight, x = there(draw_groups(form, 1536, 1024)), draw(rows, 1024)
    exact, packed = weight.dequantize(), kernels.pack_linear(weight)
    close(kernels.linear(x, packed), REFERENCE.linear(x.float(), REFERENCE.pack_linear(exact)))
    gated = REFERENCE.gated_linear(x.float(), REFERENCE.pack_linear(exact))
    close(kernels.gated_linear(x, packed), gated)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_products_of_float8_checkpoints(has_blocks: bool, rows: int) -> None:
    weight, x = there(draw_float8(1536, 1024, has_blocks)), draw(rows, 1024)
    expected = x.float() @ weight.dequantize().t()
    steady = TritonKernels(DEVICE, batch_invariant=True)  # activations stay as they are
    close(steady.linear(x, steady.pack_linear(weight)), expected)


@pytest.mark.parametrize("rows", [1, 40, 900])
@pytest.mark.parametrize("has_shared", [False, True])
def test_experts(kernels: TritonKernels, rows: int, has_shared: bool) -> None:
    x, gate_up, down = draw(rows, 512), draw(60, 512, 512) * 0.05, draw(60, 512, 256) * 0.05
    # Of logits in bfloat16 some would be equal, and experts then chosen otherwise.
    routing = Routing(draw(rows, 60, seed=3, dtype=torch.float32), 4, is_normalized=True)
    gate, out, ours, theirs = draw(rows, 1), draw(rows, 512, seed=5), None, None
    if has_shared:
        ours, theirs = SharedExpert(gate, out), SharedExpert(gate.float(), out.float())
    expected = REFERENCE.moe(
        x.float(), StackedExperts(gate_up.float(), down.float()), routing, theirs
    )
    close(kernels.moe(x, StackedExperts(gate_up, down), routing, ours), expected)


def steps() -> dict[str, PagedStep]:
    """One long context among many, short chunks over long ones, windows, odd heads, padding.

    Few: each is some kernels more to compile, where time is short.
    """
    wide, grouped, odd = Heads(16, 8, 128), Heads(32, 4, 64), Heads(10, 2, 96)
    large = Heads(8, 4, 256)
    return {
        "decodes": draw_step(wide, [1, 70, 300, 9, 64], block_size=64),
        "one long": draw_step(wide, [9000] + [40] * 70, block_size=64),
        "chunks": draw_step(wide, [], [(200, 200), (333, 77), (64, 1)], block_size=16),
        "a short chunk": draw_step(grouped, [50] * 9, [(6000, 20)], block_size=64),
        "window": draw_step(grouped, [700, 30], [(900, 300)], window=256, block_size=64),
        "softcap": draw_step(large, [700, 30], [(400, 300)], softcap=30.0, block_size=32),
        "odd": draw_step(odd, [77, 500], [(130, 60)], block_size=16, num_padding=3),
    }


STEPS = steps() if torch.cuda.is_available() else {}


@pytest.mark.parametrize(
    ("name", "kv_cache"),
    [
        ("one long", "auto"),
        ("chunks", "auto"),
        ("a short chunk", "fp8"),
        ("decodes", "int8"),
        ("window", "auto"),
        ("softcap", "int8"),
        ("odd", "fp8"),
    ],
)
def test_attention(kernels: TritonKernels, name: str, kv_cache: str) -> None:
    if kv_cache == "fp8" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("no fp8")
    step = replace(STEPS[name], kv_cache=kv_cache)
    on_device = DTYPE if kv_cache == "auto" else None
    cache = layered(*(there(x, on_device) for x in parts(step.cache)))
    actual = paged_attention(
        there(step.q_THD(), DTYPE), cache, there(step.metadata), step.spec,
        num_sms=kernels.num_sms, batch_invariant=kernels.batch_invariant,
    )  # fmt: skip
    close(actual, step.expected().to(DEVICE))


@pytest.mark.parametrize(
    ("kv_cache", "head_dim", "has_norm"),
    [("auto", 128, True), ("auto", 64, False), ("int8", 256, True), ("fp8", 128, True)],
)
def test_rope_and_kv_store(
    kernels: TritonKernels, kv_cache: str, head_dim: int, has_norm: bool
) -> None:
    if kv_cache == "fp8" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("no fp8")
    stored, shape = kv_cache_format(kv_cache, DTYPE, DEVICE.type), (6, 16, 4)

    def empty() -> KVCache:
        k, v = (torch.zeros(*shape, head_dim, dtype=stored.dtype, device=DEVICE) for _ in "kv")
        if stored.scale_dtype is None:
            return layered(k, v)
        return layered(
            k, v, *(torch.zeros(shape, dtype=stored.scale_dtype, device=DEVICE) for _ in "kv")
        )

    step = draw_step(Heads(8, 4, head_dim), [], [(40, 37)])
    metadata = there(
        replace(
            step.metadata,
            positions_T=torch.arange(37),
            slot_mapping_T=torch.randperm(96)[:37].index_fill(0, torch.tensor([5]), -1),
        )
    )
    norm = QKNorm(draw(head_dim), draw(head_dim, seed=1), 1e-6) if has_norm else None
    angles = draw(40, head_dim // 2, dtype=torch.float32)
    rotary = Rotary(angles.cos().to(DTYPE), angles.sin().to(DTYPE))
    qkv, ours, theirs = draw(37, 16 * head_dim), empty(), empty()
    expected = REFERENCE.rope_and_store_kv(qkv.clone(), 8, norm, rotary, theirs, metadata)
    close(kernels.rope_and_store_kv(qkv, 8, norm, rotary, ours, metadata), expected)
    for name in ("k", "v"):
        pair = [getattr(cache, f"{name}_NSKD").float() for cache in (ours, theirs)]
        if stored.scale_dtype is not None:
            pair = [
                values * getattr(cache, f"{name}_scale_NSK")[..., None].float()
                for values, cache in zip(pair, (ours, theirs), strict=True)
            ]
        # What is rounded once more before may be a neighbouring number of fp8, an eighth away.
        close(*pair, max_error=0.05 if kv_cache == "fp8" else MAX_ERROR)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_before_the_layers(kernels: TritonKernels, quantization: str | None) -> None:
    def ints(*shape: int, limit: int) -> Tensor:
        return torch.randint(limit, shape, generator=torch.Generator().manual_seed(limit))

    rows = there(
        StepRows(
            token_table=ints(9, 5000, limit=700).int(), block_tables=ints(9, 3000, limit=999).int(),
            block_size=64, rows_T=ints(20, limit=9), positions_T=ints(20, limit=5000),
            rows_B=torch.tensor([4, 0, 7]), seq_lens_B=torch.tensor([192000, 64 * 1500, 1]).int(),
            block_rows_W=torch.tensor([4, 0, 2]), block_columns_W=torch.tensor([2999, 1499, 3]),
            block_ids_W=torch.tensor([5, 6, 7]).int(),
        )
    )  # fmt: skip
    packed = kernels.pack_linear(draw(512, 1536), quantization)
    embedding = TokenEmbedding(packed, 100, 1.5, DTYPE)
    ours, theirs = rows, msgspec.structs.replace(rows, block_tables=rows.block_tables.clone())
    begun, expected = kernels.begin_step(ours, embedding), REFERENCE.begin_step(theirs, embedding)
    assert begun.x_TE is not None
    torch.testing.assert_close(begun.x_TE, expected.x_TE)
    assert torch.equal(ours.block_tables, theirs.block_tables)
    for row, num_blocks in enumerate((3000, 1500, 1)):
        ids, expected_ids = begun.block_tables[0][row], expected.block_tables[0][row]
        assert torch.equal(ids[:num_blocks], expected_ids[:num_blocks])


@pytest.mark.parametrize("scale", [0.05, 8.0], ids=["flat", "peaked"])
def test_sampling(kernels: TritonKernels, scale: float) -> None:
    num_rows, vocab_size = 64, 151_936
    logits = draw(num_rows, vocab_size, dtype=torch.float32) * scale
    rows = torch.arange(num_rows, device=DEVICE)
    heat = 0.5 + (rows % 3).float()
    noise = Noise(heat, rows * 7, rows + 1000)
    filters = Filters(
        torch.where(rows % 2 == 0, 50, vocab_size).int(),
        torch.where(rows % 3 == 0, 0.9, 1.0),
        torch.where(rows % 5 == 0, 0.02, 0.0),
    )
    greedy = msgspec.structs.replace(noise, temperature_R=heat * 0)
    assert torch.equal(kernels.best_token(logits, 0, greedy)[1], logits.argmax(1))
    table = torch.zeros(num_rows, 4, dtype=torch.int32, device=DEVICE)
    places = TokenPlaces(table, rows, rows % 4)
    _, plain = kernels.best_token(logits, 0, noise, places)
    assert torch.equal(table[rows, rows % 4].long(), plain)
    everything = torch.arange(vocab_size, device=DEVICE)
    noisy = logits / heat[:, None] + gumbel_noise(noise.seed_R, noise.position_R, everything)
    best = noisy.amax(1)
    # Logarithms are rounded otherwise: a token may be another one, of as much.
    torch.testing.assert_close(noisy.gather(1, plain[:, None])[:, 0], best, rtol=1e-5, atol=1e-4)
    _, filtered = kernels.best_filtered_token(logits, noise, filters)
    _, expected = REFERENCE.best_filtered_token(logits, noise, filters)
    assert (filtered != expected).sum() <= 2  # where rounding decides


def test_what_a_mask_forbids_is_as_minus_infinity(kernels: TritonKernels) -> None:
    num_rows, first_token, width = 12, 77, 75_968
    words = torch.randint(-(2**31), 2**31, (4, -(-(first_token + width) // 32)), device=DEVICE)
    words[:2] *= torch.rand(words[:2].shape, device=DEVICE) < 0.02
    rows = torch.arange(num_rows, device=DEVICE)
    mask = TokenMask(words.int(), (rows % 5 - 1).int())
    noise = Noise(0.5 + (rows % 2).float(), rows * 7, rows + 1000)
    logits = draw(num_rows, width, dtype=torch.float32) * 3
    expected = logits.masked_fill(~mask.is_allowed(first_token, width), -torch.inf)
    ours = kernels.best_token(logits, first_token, noise, mask=mask)
    for x, y in zip(ours, kernels.best_token(expected, first_token, noise), strict=True):
        assert torch.equal(x, y)
    for top_k in (50, width):
        filters = Filters((rows * 0 + top_k).int(), rows * 0 + 0.95, rows * 0.0)
        expected = logits.masked_fill(~mask.is_allowed(0, width), -torch.inf)
        ours = kernels.best_filtered_token(logits, noise, filters, mask)
        theirs = kernels.best_filtered_token(expected, noise, filters)
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
