"""Products of a step at the shapes of the models, in each form of weights, beside torch's.

What else a step computes is in its profile, which `engine` takes. References are in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernel_case import Draw, KernelCase, relative_error
from benchmarks.gpu.session import Session, UnavailableError
from benchmarks.gpu.shapes import Model, models
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import FP8, LinearWeight, quantize_rows


def layer_cases(session: Session) -> Iterator[KernelCase]:
    """Linear layers, those of the larger model first; then heads."""
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    by_size = list(models(session).values())[::-1]
    rows = (3,) if session.small else (1, 32, 256, 64, 8, 16, 48, 128)
    for model, count, form in product(by_size, rows, (None, "int8", "fp8")):
        yield from _linear_layers(session, model, count, dtype, form)
    for model, count in product(by_size, (3,) if session.small else (1, 32, 256)):
        yield _head(session, model, count, dtype)


def _linear_layers(
    session: Session, model: Model, rows: int, dtype: torch.dtype, form: str | None
) -> Iterator[KernelCase]:
    shape = model.shape
    q_size = shape.num_attention_heads * shape.head_dim
    kv_size = shape.num_key_value_heads * shape.head_dim
    layers = {
        "gated_linear": (2 * shape.intermediate_size, shape.hidden_size),
        "linear/down": (shape.hidden_size, shape.intermediate_size),
        "linear/qkv": (q_size + 2 * kv_size, shape.hidden_size),
    }
    for layer, (num_out, num_in) in layers.items():
        is_gated = layer == "gated_linear"
        num_results = num_out // 2 if is_gated else num_out
        weight_bytes = num_out * (num_in + 4) if form else num_out * num_in * dtype.itemsize

        def run(kernels: Kernels, s: Product, is_gated: bool = is_gated) -> Tensor:
            return (kernels.gated_linear if is_gated else kernels.linear)(s.x, s.weight)

        def error(s: Product, out: Tensor, is_gated: bool = is_gated) -> float:
            return relative_error(
                out, _gate(s.rounded_x().double() @ s.dense(torch.float32).double().T, is_gated)
            )

        def by_torch(s: Product, is_gated: bool = is_gated) -> Callable[[], Tensor]:
            """By cuBLAS; weights that are stored in less are made dense beforehand."""
            dense = s.dense(s.x.dtype)
            return lambda: _gate(F.linear(s.x, dense), is_gated)

        yield KernelCase(
            name=f"{layer}/{model.name}/{rows}/{form or 'plain'}",
            num_bytes=weight_bytes + dtype.itemsize * rows * (num_in + num_results),
            flops=2 * rows * num_out * num_in,
            make=partial(Product.make, session.device, dtype, (rows, num_out, num_in), form),
            run=run,
            error=error,
            others={"torch, dense": by_torch},
        )


def _gate(y: Tensor, is_gated: bool) -> Tensor:
    if not is_gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Product:
    """Operands of a linear layer."""

    x: Tensor
    weight: LinearWeight
    kernels: Kernels

    @classmethod
    def make(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        form: str | None,
        kernels: Kernels,
        number: int,
    ) -> Product:
        """sizes: rows, outputs, inputs. form: how weights are stored.

        Raises:
            UnavailableError: the backend does not store weights so.
        """
        rows, num_out, num_in = sizes
        draw = Draw(device, dtype, number)
        weight = draw.normal(num_out, num_in, std=num_in**-0.5)
        try:
            packed = kernels.pack_linear(weight, form)
        except ValueError as refusal:
            raise UnavailableError(str(refusal)) from refusal
        return cls(draw.normal(rows, num_in), packed, kernels)

    def rounded_x(self) -> Tensor:
        """The operands as they are multiplied: with fp8 weights they are fp8, too."""
        if self.weight.dtype != FP8:
            return self.x
        values_TI, scale_T = quantize_rows(self.x)
        return values_TI.float() * scale_T[:, None]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as it is multiplied; backends on CUDA keep it row by row."""
        weight_OI = self.weight.data.to(dtype)
        if self.weight.scale_O is None:
            return weight_OI
        return (weight_OI.float() * self.weight.scale_O[:, None]).to(dtype)


def _head(session: Session, model: Model, rows: int, dtype: torch.dtype) -> KernelCase:
    size, vocab = model.shape.hidden_size, model.shape.vocab_size

    def by_torch(s: Product) -> Tensor:
        return F.linear(s.x, s.weight.data).float()

    return KernelCase(
        name=f"logits/{model.name}/{rows}",
        num_bytes=dtype.itemsize * size * (vocab + rows) + 4 * rows * vocab,
        flops=2 * rows * vocab * size,
        make=partial(Product.make, session.device, dtype, (rows, vocab, size), None),
        run=lambda kernels, s: kernels.logits(s.x, s.weight),
        error=lambda s, out: relative_error(out, s.x.float() @ s.weight.data.float().T),
        others={"torch, rounded": lambda s: partial(by_torch, s)},
    )
