"""Counts what a rank's part of a model costs, from the model built without memory.

Weights are counted as checkpoints name them, and in bytes as they are when they are packed, so
quantization is seen. Every family is counted by its own layers; none is known here.
"""

from __future__ import annotations

import torch

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.cost.model_cost import AttentionCost, ModelCost, by_window
from nanocore.worker.devices import dtype_name
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import POSITIONS, TensorEntry, unbuffered_bytes
from nanocore.worker.memory.kv_memory import KVLayout, KVSpec, StateSpec, draft_bytes, in_full_group
from nanocore.worker.rank_messages import WorkerConfig, WorkerInfo


def outlined_info(
    outline: DecoderModel,
    config: WorkerConfig,
    kernels: Kernels,
    kv_format: KVCacheFormat,
    device: torch.device,
    draft: DecoderModel | None = None,
) -> WorkerInfo:
    """What is known of a rank that has no memory yet; so there is none in it for the KV cache.

    outline: its part of the model, on the meta device. device: the rank's. draft: the draft model,
    likewise, whose memory is counted; the cost is of the model alone.
    """
    specs, size = outline.cache_specs, config.block_size
    own_bytes = activation_bytes = rotation_bytes = 0
    cost = rank_cost(outline, KVLayout(specs, kv_format, size), config, kernels)
    if draft is not None:
        specs = [*specs, *in_full_group(draft.cache_specs)]
        layout = KVLayout(draft.cache_specs, kv_format, size)
        own_bytes = rank_cost(draft, layout, config, kernels).held_bytes
        activation_bytes = _activation_bytes(draft, config)
        rotation_bytes = _rotation_bytes(draft, config)
    return WorkerInfo(
        device=str(device),
        dtype=dtype_name(outline.placement.dtype),
        kernels=kernels.name,
        kernel_variant=kernels.variant,
        weight_bytes=cost.held_bytes + own_bytes,
        kv_groups=KVLayout(specs, kv_format, size).groups,
        available_kv_bytes=0,
        memory_bytes=0,
        activation_bytes=_activation_bytes(outline, config) + activation_bytes,
        table_bytes=table_bytes(outline, config)
        + rotation_bytes
        + draft_bytes(specs, config.max_num_seqs + 1, config.max_drafts),
        cost=cost,
    )


def rank_cost(
    model: DecoderModel, layout: KVLayout, config: WorkerConfig, kernels: Kernels
) -> ModelCost:
    """Count the cost of a rank's part. model: on the meta device; it is packed as kernels would."""
    entries = model.entries()
    positions = entries.get(POSITIONS, TensorEntry(()))
    dtype = model.placement.dtype
    packer = WeightPacker(
        TorchKernels(), dtype, config.quantization, kernels.kept_forms, kernels.stacks_experts
    )
    model.pack(packer)
    ends = {id(end): end.weight for end in (model.embedding, model.head) if end is not None}
    end_params = sum(weight.out_features * weight.in_features for weight in ends.values())
    lookup_bytes = sum(part.target.nbytes for part in positions.parts)
    if model.embedding is not None and model.embedding is not model.head:
        lookup_bytes += model.embedding.weight.packed.num_bytes
    head = None if model.head is None else model.head.weight
    moe = model.config.moe
    held_bytes = packer.num_bytes + unbuffered_bytes(entries)
    return ModelCost(
        num_params=sum(entry.counted_params for entry in entries.values()),
        token_params=packer.num_params - packer.expert_params - end_params,
        head_params=0 if head is None else head.out_features * head.in_features,
        expert_params=packer.expert_params,
        num_experts=moe.num_experts if moe else 0,
        num_experts_per_tok=moe.num_experts_per_tok if moe else 0,
        weight_bytes=held_bytes - packer.expert_bytes - lookup_bytes,
        expert_bytes=packer.expert_bytes,
        lookup_bytes=lookup_bytes,
        attention=by_window(
            AttentionCost(
                window=spec.window,
                kv_bytes=layout.layer_bytes(i) / config.block_size,
                pair_flops=layer.mixer.pair_flops,
            )
            for i, (layer, spec) in enumerate(zip(model.layers, layout.specs, strict=True))
            if isinstance(spec, KVSpec)
        ),
        state_bytes=sum(
            layout.layer_bytes(i)
            for i, spec in enumerate(layout.specs)
            if isinstance(spec, StateSpec)
        ),
    )


def _activation_bytes(model: DecoderModel, config: WorkerConfig) -> int:
    """About: hidden states of the largest step in its widest layer, and logits of every sample."""
    model_config, tp_size = model.config, model.placement.tp.size
    attention, inner, moe = model_config.attention, model_config.mlp.inner_size, model_config.moe
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads  # Q, K, V and the result
    if moe is not None:
        inner = max(inner, moe.inner_size * moe.num_experts_per_tok)
    widest = max(heads * attention.head_dim, 3 * inner) // tp_size
    # Results of a layer with states are of other sizes, so they have memory of their own; its gates
    # and its output are about half as wide as its inputs.
    specs = [spec for spec in model.cache_specs if isinstance(spec, StateSpec)]
    widest += max((3 * spec.num_inputs // 2 for spec in specs), default=0)
    itemsize = model.placement.dtype.itemsize
    num_bytes = config.max_num_batched_tokens * (2 * model_config.hidden_size + widest) * itemsize
    if model.head is not None:
        num_bytes += config.max_samples * model.head.num_tokens * torch.float32.itemsize
    return num_bytes


def table_bytes(model: DecoderModel, config: WorkerConfig) -> int:
    """Bytes of tables of rows and positions: token ids twice, block ids, and rotations."""
    rows, length = config.max_num_seqs, config.max_model_len
    token_bytes = 2 * 4 * rows * (length + 1) + 4 * rows * -(-length // config.block_size)
    return token_bytes + _rotation_bytes(model, config)


def _rotation_bytes(model: DecoderModel, config: WorkerConfig) -> int:
    attention = model.config.attention
    rotations = set(map(attention.rotation, range(model.config.num_layers)))
    values = sum(2 if name == "none" else attention.rope[name].rotary_dim for name in rotations)
    return config.max_model_len * values * model.placement.dtype.itemsize
