"""Our attention called as other engines call theirs: by tensors alone."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata, AttentionSpec, Kernels, KVCache
from nanocore.kernels.selection import select_kernels


@cache
def _kernels(device: torch.device) -> Kernels:
    """What the engine takes on this device, by torch on a CPU: its cache has the plain layout."""
    return select_kernels("auto" if device.type == "cuda" else "torch", device)


def attend_paged(
    q_THD: Tensor,
    k_NSKD: Tensor,
    v_NSKD: Tensor,
    query_start_A: Tensor,
    seq_lens_B: Tensor,
    block_table_BM: Tensor,
    scale: float,
    num_decodes: int,
) -> Tensor:
    """Causal attention over a paged cache, [T, H, D]; num_decodes is all sequences, or none."""
    batch = len(seq_lens_B)
    longest = block_table_BM.shape[1] * k_NSKD.shape[1]
    is_decode = num_decodes == batch
    # Decodes may be captured, when the host must not look at the device.
    starts = list(range(batch + 1)) if is_decode else query_start_A.tolist()
    on_host = is_decode and q_THD.device.type == "cuda"
    lengths = [longest] * batch if on_host else seq_lens_B.tolist()
    empty = torch.empty(0, dtype=torch.int64, device=q_THD.device)
    metadata = AttentionMetadata(
        num_decodes=num_decodes,
        query_start=starts,
        seq_lens=lengths,
        num_decodes_1=torch.full((1,), num_decodes, dtype=torch.int32, device=q_THD.device),
        query_start_A=query_start_A,
        seq_lens_B=seq_lens_B,
        block_table_BM=block_table_BM,
        positions_T=empty,
        slot_mapping_T=empty,
    )
    kernels = _kernels(q_THD.device)
    return kernels.paged_attention(
        q_THD, KVCache(k_NSKD, v_NSKD), metadata, AttentionSpec(scale=scale)
    )
