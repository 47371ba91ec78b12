"""Every other kernel of a step at the shapes of the models, beside what torch has for it.

References are torch's kernels of ours in float32, or the definition written out in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.attention_cases import Heads, Step, make_step
from benchmarks.gpu.kernel_case import Draw, KernelCase, relative_error
from benchmarks.gpu.session import Session
from benchmarks.gpu.shapes import Model, models
from nanocore.kernels.backend import QKNorm, Rotary
from nanocore.kernels.torch_backend import TorchKernels
from nanocore.kernels.torch_moe import Routing

_EPS: Final = 1e-6
_REFERENCE: Final = TorchKernels()


def layer_cases(session: Session) -> Iterator[KernelCase]:
    """Norms, rotation with the KV store, linear layers, gates, head, experts."""
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    rows = (1, 5) if session.small else (1, 32, 256, 4096)
    for model in models(session).values():
        for count in rows:
            yield from _norms(session, model, count, dtype)
            yield _rope(session, model, count, dtype)
            yield from _linear_layers(session, model, count, dtype)
            if count <= 256:
                yield _head(session, model, count, dtype)
    for count in rows:
        yield _experts(session, count, dtype)


def _norms(session: Session, model: Model, rows: int, dtype: torch.dtype) -> Iterator[KernelCase]:
    size = model.shape.hidden_size

    def make(number: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = Draw(session.device, dtype, number)
        return draw.normal(rows, size), draw.normal(rows, size), draw.norm_weight(size)

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()

    moved = rows * size * dtype.itemsize
    yield KernelCase(
        name=f"rms_norm/{model.name}/{rows}",
        num_bytes=2 * moved,
        flops=0,
        make=make,
        run=lambda kernels, s: kernels.rms_norm(s[0], s[2], _EPS),
        error=lambda s, out: relative_error(out, expected(s[0], s[2])),
        others={"torch": lambda s: F.rms_norm(s[0], (size,), s[2], _EPS)},
    )
    # The sum may be written over its operand, so the error is of a fresh copy.
    yield KernelCase(
        name=f"add_rms_norm/{model.name}/{rows}",
        num_bytes=4 * moved,
        flops=0,
        make=make,
        run=lambda kernels, s: kernels.add_rms_norm(s[0], s[1], s[2], _EPS),
        error=lambda s, out: relative_error(out[0], expected(out[1], s[2])),
        others={"torch": lambda s: F.rms_norm(s[0] + s[1], (size,), s[2], _EPS)},
    )


def _rope(session: Session, model: Model, rows: int, dtype: torch.dtype) -> KernelCase:
    shape = model.shape
    heads = Heads(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    num_heads = heads.num_q + 2 * heads.num_kv
    longest = max(64, rows)

    def make(number: int) -> tuple[Tensor, QKNorm, Rotary, Step]:
        draw = Draw(session.device, dtype, number)
        step = make_step(session, heads, [(longest, rows)], number, dtype)
        slots = torch.randperm(step.cache.k_NSKD.shape[0] * step.cache.k_NSKD.shape[1])[:rows]
        step.metadata.slot_mapping_T.copy_(slots)
        norm = QKNorm(draw.norm_weight(heads.size), draw.norm_weight(heads.size), _EPS)
        angles = draw.normal(longest, heads.size // 2)
        rotary = Rotary(angles.cos(), angles.sin())
        return draw.normal(rows, num_heads * heads.size), norm, rotary, step

    def run(kernels: Any, s: tuple[Tensor, QKNorm, Rotary, Step]) -> tuple[Tensor, Tensor]:
        qkv, norm, rotary, step = s
        q = kernels.rope_and_store_kv(qkv, heads.num_q, norm, rotary, step.cache, step.metadata)
        return q, step.cache.k_NSKD

    def error(s: tuple[Tensor, QKNorm, Rotary, Step], out: tuple[Tensor, Tensor]) -> float:
        """K is compared, which is never written over its operand."""
        qkv, norm, rotary, step = s
        k = qkv.view(rows, num_heads, -1)[:, heads.num_q : heads.num_q + heads.num_kv].double()
        k = k * (k.square().mean(-1, keepdim=True) + _EPS).rsqrt() * norm.k_weight.double()
        cos, sin = (
            x[step.metadata.positions_T].double()[:, None] for x in (rotary.cos, rotary.sin)
        )
        first, second = k.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return relative_error(out[1].flatten(0, 1)[step.metadata.slot_mapping_T], turned)

    return KernelCase(
        name=f"rope_and_store_kv/{model.name}/{rows}",
        num_bytes=2 * rows * num_heads * heads.size * dtype.itemsize,
        flops=0,
        make=make,
        run=run,
        error=error,
    )


def _linear_layers(
    session: Session, model: Model, rows: int, dtype: torch.dtype
) -> Iterator[KernelCase]:
    shape = model.shape
    q_size = shape.num_attention_heads * shape.head_dim
    kv_size = shape.num_key_value_heads * shape.head_dim
    layers = {
        "linear/qkv": (q_size + 2 * kv_size, shape.hidden_size),
        "linear/o": (shape.hidden_size, q_size),
        "linear/down": (shape.hidden_size, shape.intermediate_size),
        "gated_linear": (2 * shape.intermediate_size, shape.hidden_size),
    }
    for layer, (num_out, num_in) in layers.items():
        is_gated = layer == "gated_linear"
        num_results = num_out // 2 if is_gated else num_out

        def make(number: int, num_out: int = num_out, num_in: int = num_in) -> tuple[Tensor, Any]:
            draw = Draw(session.device, dtype, number)
            weight = _REFERENCE.pack_linear(draw.normal(num_out, num_in, std=num_in**-0.5))
            return draw.normal(rows, num_in), weight

        def run(kernels: Any, s: tuple[Tensor, Any], is_gated: bool = is_gated) -> Tensor:
            return (kernels.gated_linear if is_gated else kernels.linear)(*s)

        def expected(s: tuple[Tensor, Any], is_gated: bool = is_gated) -> Tensor:
            y = s[0].double() @ s[1].data.double().T
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up if is_gated else y

        def torch_layer(s: tuple[Tensor, Any], is_gated: bool = is_gated) -> Tensor:
            y = F.linear(s[0], s[1].data)
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up if is_gated else y

        yield KernelCase(
            name=f"{layer}/{model.name}/{rows}",
            num_bytes=dtype.itemsize * (num_out * num_in + rows * (num_in + num_results)),
            flops=2 * rows * num_out * num_in,
            make=make,
            run=run,
            error=partial(_error_of, expected),
            others={"torch": torch_layer},
        )


def _error_of(expected: Callable[[Any], Tensor], operands: Any, out: Tensor) -> float:
    return relative_error(out, expected(operands))


def _head(session: Session, model: Model, rows: int, dtype: torch.dtype) -> KernelCase:
    size, vocab = model.shape.hidden_size, model.shape.vocab_size

    def make(number: int) -> tuple[Tensor, Any]:
        draw = Draw(session.device, dtype, number)
        return draw.normal(rows, size), _REFERENCE.pack_linear(
            draw.normal(vocab, size, std=size**-0.5)
        )

    return KernelCase(
        name=f"logits/{model.name}/{rows}",
        num_bytes=dtype.itemsize * size * (vocab + rows) + 4 * rows * vocab,
        flops=2 * rows * vocab * size,
        make=make,
        run=lambda kernels, s: kernels.logits(*s),
        error=lambda s, out: relative_error(out, s[0].float() @ s[1].data.float().T),
        others={"torch, rounded": lambda s: F.linear(s[0], s[1].data).float()},
    )


def _experts(session: Session, rows: int, dtype: torch.dtype) -> KernelCase:
    """Qwen3-30B-A3B's: 128 experts, 8 of them chosen."""
    experts, chosen, size, inner = (4, 2, 32, 16) if session.small else (128, 8, 2048, 768)

    def make(number: int) -> tuple[Tensor, ...]:
        draw = Draw(session.device, dtype, number)
        return (
            draw.normal(rows, size),
            draw.normal(experts, 2 * inner, size, std=size**-0.5),
            draw.normal(experts, size, inner, std=inner**-0.5),
            draw.normal(rows, experts),
        )

    def error(s: tuple[Tensor, ...], out: Tensor) -> float:
        x, gate_up, down, logits = (t[:64] if i in (0, 3) else t for i, t in enumerate(s))
        routing = Routing(logits, chosen, is_normalized=True)
        expected = _REFERENCE.moe(x.float(), gate_up.float(), down.float(), routing)
        return relative_error(out[:64], expected)

    used = experts * (1 - (1 - chosen / experts) ** rows)  # as chosen at random
    return KernelCase(
        name=f"moe/30b-a3b/{rows}",
        num_bytes=dtype.itemsize * (used * 3 * inner * size + 2 * rows * size),
        flops=6 * rows * chosen * inner * size,
        make=make,
        run=lambda kernels, s: kernels.moe(*s[:3], Routing(s[3], chosen, is_normalized=True)),
        error=error,
    )
