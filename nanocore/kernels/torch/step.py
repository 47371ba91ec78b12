"""Norms and sums in plain torch, one operation after the other. Shape suffixes: see `interface`."""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.linear import LinearKernels
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.step import BegunStep, GraphSupport, RankGroup, Replay, StepRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def select_add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
) -> Tensor:
    return rms_norm(residual_TE[index_R] + x_TE[index_R], weight, eps)


def select(x_TE: Tensor, index_R: Tensor) -> Tensor:
    return x_TE[index_R]


def add(x_TE: Tensor, residual_TE: Tensor) -> Tensor:
    return x_TE + residual_TE


def all_reduce(x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
    y_TE = group.all_reduce(x_TE)
    return y_TE if bias_E is None else y_TE + bias_E


def capture(compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
    return None


class TorchStep:
    """Implements `StepKernels`, for a backend with whatever embedding."""

    graph_support: GraphSupport = "never"
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    select_add_rms_norm = staticmethod(select_add_rms_norm)
    select = staticmethod(select)
    add = staticmethod(add)
    all_reduce = staticmethod(all_reduce)
    capture = staticmethod(capture)

    def begin_step(
        self: LinearKernels, rows: StepRows, embedding: TokenEmbedding | None
    ) -> BegunStep:
        rows.append_blocks()
        x_TE = None if embedding is None else self.embedding(rows.token_ids(), embedding)
        return BegunStep(rows.block_ids(), None, x_TE)
