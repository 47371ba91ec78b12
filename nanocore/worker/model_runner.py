"""Runs a step on one rank: applies the plan to the persistent batch, calls the model, samples.

A rank of a pipeline's later stage receives hidden states instead of embedding token ids, and one of
an earlier stage sends them on instead of sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata, Kernels, KVCache, Replay, Rotary
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.protocol.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.protocol.worker import Quantization
from nanocore.worker.input_batch import InputBatch, StepInputs
from nanocore.worker.layers.context import StepContext
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.placement import Placement
from nanocore.worker.sampling.sampler import sample

NOTHING_SAMPLED = ModelRunnerOutput(rows=b"", token_ids=b"")


class Channel(Protocol):
    """Passes hidden states from a rank to the one behind it in the next stage, in order."""

    def send(self, tensor: Tensor) -> None: ...

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StageLinks:
    """A rank's connections to the stages before and after its own, where there are any."""

    receive: Channel | None = None
    send: Channel | None = None


class ModelRunner:
    """One rank's part of a model.

    Args:
        model: its weights loaded. kernels: the backend. links: to neighbouring stages.
    """

    def __init__(
        self, model: DecoderModel, kernels: Kernels, links: StageLinks | None = None
    ) -> None:
        self.model, self.kernels = model, kernels
        self.config = model.config
        self.placement: Placement = model.placement
        self.device = model.placement.device
        self.links = links or StageLinks()
        self.kv_caches: list[KVCache] = []
        self.rotary: dict[str, Rotary] = {}
        self._replay: Replay | None = None

    @torch.inference_mode()
    def allocate(
        self,
        kv_format: KVCacheFormat,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Allocate the KV cache and the persistent batch, compute the rotary tables, capture."""
        self.kv_caches = [
            self._kv_cache(kv_format, (num_blocks, block_size, layer.attention.num_kv_heads))
            for layer in self.model.layers
        ]
        self.rotary = self.model.rotary_tables(max_model_len)
        self.batch = InputBatch(
            max_num_seqs, max_model_len, block_size, self.config.vocab_size,
            self.device, self.placement.pp_size,
        )  # fmt: skip
        if self.placement.num_ranks == 1:
            self._replay = self.kernels.capture(self._compute, max_num_batched_tokens, max_num_seqs)

    def kv_block_bytes(self, kv_format: KVCacheFormat, block_size: int) -> int:
        """Bytes that one block takes over this rank's layers, K and V."""
        num_heads = sum(layer.attention.num_kv_heads for layer in self.model.layers)
        return 2 * block_size * num_heads * kv_format.bytes_per_head(self.config.head_dim)

    def pack(self, quantization: Quantization | None) -> int:
        """Give the loaded weights to the backend; returns the bytes that saves."""
        packer = WeightPacker(self.kernels, quantization)
        self.model.pack(packer)
        return packer.saved_bytes

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step of the plan; only the last stage samples."""
        if not self.placement.is_last_stage:
            self.batch.take_sampled(plan)
        self.batch.apply(plan)
        if plan.num_tokens == 0:
            return NOTHING_SAMPLED
        inputs = self.batch.prepare(plan)
        logits_RV = self._run_model(inputs)
        if logits_RV is None:
            return NOTHING_SAMPLED
        token_ids_R = self.sample(logits_RV, inputs.sample_rows, inputs.sample_positions)
        self.batch.append(inputs.sample_rows, token_ids_R)
        return ModelRunnerOutput(
            rows=inputs.sample_rows.astype("<i4").tobytes(),
            token_ids=token_ids_R.cpu().numpy().astype("<i4").tobytes(),
        )

    def sample(
        self, logits_RV: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor:
        """One token id for each of these rows, int64 [R], the same on every rank of the stage."""
        assert self.model.head is not None, "the last stage samples"
        return sample(
            logits_RV,
            self.batch.sampling_metadata(rows),
            torch.from_numpy(positions).to(self.device),
            self.model.head.first_token,
            self.config.vocab_size,
            self.placement.tp,
            self.kernels,
        )

    def _run_model(self, inputs: StepInputs) -> Tensor | None:
        """Logits of the rows that sample, or None where there are none."""
        token_ids_T, metadata = inputs.token_ids_T, inputs.attention
        if self._replay is not None:
            logits_RV = self._replay(token_ids_T, metadata, inputs.sample_index_R)
            return logits_RV if len(logits_RV) else None
        if self.links.receive is None:
            x_TE = self.model.embed(token_ids_T, self.kernels)
        else:
            shape = len(token_ids_T), self.config.hidden_size
            x_TE = self.links.receive.recv(shape, self.placement.dtype)
        hidden_TE = self._forward(x_TE, metadata)
        if self.links.send is not None:
            self.links.send.send(hidden_TE)
        if not self.placement.is_last_stage or len(inputs.sample_rows) == 0:
            return None
        return self.model.compute_logits(hidden_TE[inputs.sample_index_R], self.kernels)

    def _forward(self, x_TE: Tensor, metadata: AttentionMetadata) -> Tensor:
        context = StepContext(self.kernels, metadata, self.rotary)
        return self.model.forward(x_TE, self.kv_caches, context)

    def _compute(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor:
        """A whole step of a rank that needs no other."""
        hidden_TE = self._forward(self.model.embed(token_ids_T, self.kernels), metadata)
        hidden_RE = self.kernels.select_rows(hidden_TE, sample_index_R)
        return self.model.compute_logits(hidden_RE, self.kernels)

    def _kv_cache(self, kv_format: KVCacheFormat, shape_NSK: tuple[int, int, int]) -> KVCache:
        shape_NSKD = (*shape_NSK, self.config.head_dim)
        k, v = (self._zeros(shape_NSKD, kv_format.dtype) for _ in range(2))
        if kv_format.scale_dtype is None:
            return KVCache(k, v)
        return KVCache(k, v, *(self._zeros(shape_NSK, kv_format.scale_dtype) for _ in range(2)))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros: attention masks what it gathers too much of, and 0 * NaN would be NaN."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # numpy gets zeroed pages from the system on first use; torch.zeros would touch them all,
        # and a cache sized by the machine's memory is mostly never used.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
