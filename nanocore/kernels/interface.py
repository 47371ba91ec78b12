"""The interface every kernel backend implements.

Tensor shape suffixes, here and in the whole worker:
    T tokens of the step     B sequences of the step    R sequences that sample a token
    H query heads            K key/value heads          D head dimension
    E hidden size            V vocabulary               M block table width
    N blocks in the cache    S slots (tokens) per block     A = B + 1
    L tokens of a context    G query heads per KV head
    X experts                C experts chosen per token    I inner size of an MLP, or of any input
    O output features
"""

from __future__ import annotations

from typing import Protocol

from nanocore.kernels.attention import AttentionKernels
from nanocore.kernels.linear import LinearKernels
from nanocore.kernels.sampling import SamplingKernels
from nanocore.kernels.states import StateKernels
from nanocore.kernels.step import StepKernels


class Kernels(
    LinearKernels, AttentionKernels, StateKernels, SamplingKernels, StepKernels, Protocol
):
    """A backend, put together from five parts, each its own or another backend's.

    Activations are in the model's dtype, and contiguous but for the first dimension; norms and
    softmax accumulate in float32. A kernel may write its result over an operand where it says so.
    variant: what decides the bits of its results beside its name, e.g. the instruction set.
    """

    name: str
    variant: str
