"""The Triton kernels as a backend, for CUDA; matrix products are cuBLAS's.

A decode step launches eight kernels a layer: QKV; norms, rotation and KV store; attention; output;
add and norm; gate and up with the gate, which for more than a few tokens is one more; down; add and
norm. Few sequences take one more, which merges their parts. One kernel before the layers does all
that they need but attention's plan, which the first one of each window makes; after them come the
last norm, of the rows that sample, their logits, and two kernels that sample.
Nothing waits for the device and no launch depends on what is in its memory, so every step can be
captured as a graph.

With batch_invariant, products are ours too, and every token is attended to in tiles of one shape
without parts: its bits are then the same in any batch and any chunks. Shape suffixes: `interface`.
"""

from __future__ import annotations

import os
from typing import Final

import torch
import triton
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.step import GraphSupport
from nanocore.kernels.torch import sampling as torch_sampling
from nanocore.kernels.torch import step as torch_step
from nanocore.kernels.triton import norm, sampling
from nanocore.kernels.triton.begin_step import begin_step
from nanocore.kernels.triton.filtered_sampling import best_filtered_token
from nanocore.kernels.triton.linear import TritonLinear
from nanocore.kernels.triton.paged_attention import paged_attention
from nanocore.kernels.triton.rope import rope_and_store_kv
from nanocore.kernels.triton.states import TritonStates

_INTERPRETED_SMS: Final = 4


class TritonDevice:
    """A device that Triton's kernels run on. num_sms: multiprocessors, which attention shares.

    Raises ValueError: the device is not CUDA, and Triton does not interpret (TRITON_INTERPRET=1).
    """

    def __init__(
        self,
        device: torch.device,
        batch_invariant: bool = False,
        *,
        keeps_activations: bool = False,
    ) -> None:
        self.variant = f"triton {triton.__version__}, {device.type}"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.variant += f" {torch.cuda.get_device_name(device)} {major}.{minor}"
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        elif os.environ.get("TRITON_INTERPRET") == "1":
            self.num_sms = _INTERPRETED_SMS
        else:
            raise ValueError(f"the device is {device}, and Triton's kernels are for CUDA; use auto")
        self.batch_invariant = batch_invariant
        self.keeps_activations = keeps_activations


class TritonAttention(TritonDevice):
    """Implements `AttentionKernels`."""

    block_multiple = 1
    rope_and_store_kv = staticmethod(rope_and_store_kv)

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        return paged_attention(
            q_THD, cache, metadata, spec, num_sms=self.num_sms, batch_invariant=self.batch_invariant
        )


class TritonSampling:
    """Implements `SamplingKernels`."""

    best_token = staticmethod(sampling.best_token)
    edit_logits = staticmethod(torch_sampling.edit_logits)
    best_filtered_token = staticmethod(best_filtered_token)
    logprobs = staticmethod(torch_sampling.logprobs)


class TritonStep:
    """Implements `StepKernels`."""

    graph_support: GraphSupport = "always"
    begin_step = staticmethod(begin_step)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    select_add_rms_norm = staticmethod(norm.select_add_rms_norm)
    select = staticmethod(torch_step.select)
    add = staticmethod(torch_step.add)
    all_reduce = staticmethod(torch_step.all_reduce)
    capture = staticmethod(torch_step.capture)


class TritonKernels(TritonLinear, TritonAttention, TritonStates, TritonSampling, TritonStep):
    """Implements `interface.Kernels`."""

    name = "triton"
