"""Products of a step at the shapes of the models, in each form of weights, beside cuBLAS's.

What else a step computes is in the profile that `speed` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernels import KernelCase, draw, dtype_of
from benchmarks.gpu.results import Session, UnavailableError
from benchmarks.gpu.shapes import Model, models, weight_bytes
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import LinearWeight, pack_output_scales
from nanocore.kernels.torch.backend import TorchKernels

FORMS: Final = (None, "int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class Operands:
    """Of a layer. reference: the weight as torch's kernels have it, which cannot read all that
    others pack. plain: before it was packed."""

    x: Tensor
    weight: LinearWeight
    reference: LinearWeight
    plain: Tensor

    def weight_for(self, kernels: Kernels) -> LinearWeight:
        """The weight as these kernels want it; other backends are subclasses of torch's."""
        return self.reference if type(kernels) is TorchKernels else self.weight


def product_cases(session: Session) -> Iterator[KernelCase]:
    """Linear layers, those of the larger model first; then heads."""
    rows = (3,) if session.small else (1, 32, 256)
    for model, count, form in product(models(session)[::-1], rows, FORMS):
        hidden, inner = model.shape.hidden_size, model.shape.intermediate_size
        yield _case(session, "gated_linear", model, (count, 2 * inner, hidden), form)
        yield _case(session, "linear", model, (count, hidden, inner), form)
    for model, count in product(models(session)[::-1], rows):
        sizes = count, model.shape.vocab_size, model.shape.hidden_size
        yield _case(session, "logits", model, sizes, None)


def _case(
    session: Session, kernel: str, model: Model, sizes: tuple[int, int, int], form: str | None
) -> KernelCase:
    """kernel: a method of Kernels. sizes: rows, outputs, inputs. form: how weights are stored."""
    rows, num_out, num_in = sizes
    itemsize = dtype_of(session).itemsize
    num_results = num_out // 2 if kernel == "gated_linear" else num_out

    def make(kernels: Kernels) -> Operands:
        plain = draw(session, num_out, num_in, std=num_in**-0.5)
        try:
            weight, reference = (k.pack_linear(plain, form) for k in (kernels, TorchKernels()))
        except ValueError as refusal:
            raise UnavailableError(str(refusal)) from refusal
        if form == "int8":  # with a scale for each output here, and for 32 inputs in torch's
            reference = pack_output_scales(plain)
        return Operands(draw(session, rows, num_in), weight, reference, plain)

    def by_torch(s: Operands) -> Callable[[], Tensor]:
        if kernel == "gated_linear":
            return lambda: _gated(F.linear(s.x, s.plain))
        return lambda: F.linear(s.x, s.plain)

    return KernelCase(
        name=f"products/{kernel}/{model.name}/{rows}/{form or 'plain'}",
        num_bytes=int(num_out * num_in * weight_bytes(form, itemsize))
        + itemsize * rows * (num_in + num_results),
        flops=2 * rows * num_out * num_in,
        make=make,
        run=lambda kernels, s: getattr(kernels, kernel)(s.x, s.weight_for(kernels)),
        others={"torch, dense": by_torch},
    )


def _gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up
