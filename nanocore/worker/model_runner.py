"""Runs a step: applies the plan to the persistent batch, calls the model, samples.

Each of its set-up steps is a method of its own, driven by the executor: load the model, size and
allocate the KV cache, then execute plans.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.backend import Kernels
from nanocore.protocol.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.input_batch import InputBatch
from nanocore.worker.layers import KVCache, StepContext
from nanocore.worker.loader import load_weights
from nanocore.worker.model_config import ModelConfig
from nanocore.worker.models import build_model


class ModelRunner:
    """One model on one device.

    Args:
        config: the model's. max_model_len: positions to prepare for. dtype: of weights,
        activations and KV cache. kernels: the backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.dtype, self.device = dtype, device
        self.kernels = kernels
        self.model = build_model(config, dtype, device)
        self.rotary = self.model.rotary_table(max_model_len)
        self.kv_caches: list[KVCache] = []

    @torch.inference_mode()
    def load_model(self, folder: Path) -> int:
        """Fill the parameters; returns the bytes read.

        Raises:
            ModelFileError: see `loader.load_weights`.
        """
        return load_weights(folder, self.model.slots(), self.model.ignored_tensors)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes that one block takes over all layers, K and V."""
        config = self.config
        values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return block_size * values_per_token * self.dtype.itemsize

    @torch.inference_mode()
    def allocate_kv_cache(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        """Allocate the KV cache and the persistent batch."""
        config = self.config
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_caches = [
            KVCache(self._zeros(shape), self._zeros(shape)) for _ in range(config.num_layers)
        ]
        self.batch = InputBatch(
            max_num_seqs, self.max_model_len, block_size, config.vocab_size, self.device
        )

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros: attention masks what it gathers too much of, and 0 * NaN would be NaN."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy gets zeroed pages from the system on first use; torch.zeros would touch them all,
        # and a cache sized by the machine's memory is mostly never used.
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self.dtype).view(shape)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step of the plan."""
        self.batch.apply(plan)
        if plan.num_tokens == 0:
            return ModelRunnerOutput(rows=b"", token_ids=b"")
        inputs = self.batch.prepare(plan)
        cos, sin = self.rotary(inputs.positions_T)
        context = StepContext(self.kernels, inputs.attention, cos, sin)
        hidden_TE = self.model.forward(inputs.token_ids_T, self.kv_caches, context)
        if len(inputs.sample_rows) == 0:
            return ModelRunnerOutput(rows=b"", token_ids=b"")
        logits_RV = self.model.compute_logits(hidden_TE[inputs.sample_index_R])
        token_ids_R = self.kernels.sample(logits_RV, self.batch.sampling_metadata(inputs))
        self.batch.append_sampled(inputs, token_ids_R)
        return ModelRunnerOutput(
            rows=inputs.sample_rows.astype("<i4").tobytes(),
            token_ids=token_ids_R.cpu().numpy().astype("<i4").tobytes(),
        )
