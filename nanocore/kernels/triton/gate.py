"""The gate of an MLP: act(first half) * second half, alone or as the end of a product.

Gates are SwiGLU and GEGLU (Shazeer 2020). The activation is rounded to the model's dtype before the
product is, as in the reference, wherever the gate is applied. Rows are independent of each other.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

_BLOCK: Final = 1024


@triton.jit
def apply_gate(gate, up, IS_GELU: tl.constexpr) -> tl.tensor:
    """The gated product of two tensors of the model's dtype, in that dtype."""
    x = gate.to(tl.float32)
    slope = x
    if IS_GELU:
        # 0.5 (1 + tanh(y)) = sigmoid(2 y): both activations are x times a sigmoid.
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    activated = (x * tl.sigmoid(slope)).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gated_kernel(
    x, out, size, x_stride, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask)
    up = tl.load(x + row * x_stride + size + columns, mask=mask)
    tl.store(out + row * size + columns, apply_gate(gate, up, IS_GELU), mask=mask)


def gated(x_TO: Tensor, activation: Activation) -> Tensor:
    """act(first half) * second half, [T, O / 2]."""
    num_rows, width = x_TO.shape
    assert (width % 2, x_TO.stride(1)) == (0, 1)
    size = width // 2
    out = torch.empty(num_rows, size, dtype=x_TO.dtype, device=x_TO.device)
    if num_rows:
        gated_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            x_TO, out, size, x_TO.stride(0), BLOCK=_BLOCK, IS_GELU=activation == "gelu",
            num_warps=4, **pdl(x_TO.device),
        )  # fmt: skip
    return out
