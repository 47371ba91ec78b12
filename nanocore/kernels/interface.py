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

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.grouped_weight import CheckpointWeight, QuantizedForm
from nanocore.kernels.linear_weight import Experts, ExpertWeights, LinearWeight, TokenEmbedding
from nanocore.kernels.logit_edits import LogitEdits, TokenMask
from nanocore.kernels.rank_group import RankKernels
from nanocore.kernels.step_rows import StepRows, TokenPlaces

GraphSupport = Literal["never", "decodes", "always"]
"""Steps that a graph can be captured of: none, those with nothing but decodes, or all."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention's view of a step; built once per step and handed down the call.

    Sequences are ordered decodes first (one query token each), then prefill chunks.
    num_decodes: how many of the B are decodes; num_decodes_1: the same, int32 on the device.
    query_start: B + 1 offsets into T, on the host; query_start_A: the same, int32 on the device.
    seq_lens: B context lengths including this step's tokens, on the host; seq_lens_B: the same,
    int32 on the device. A sequence of length 0 is padding, and its tokens are.
    block_table_BM: int32 block ids of each sequence; entries past its length are arbitrary valid
    ids. positions_T: int64, each token's place in its sequence. slot_mapping_T: int64, where its K
    and V go: block_id * S + slot; -1 is padding: such a token is stored nowhere. Tokens past
    query_start[-1] are padding too.

    In a step that a graph replays, what is on the device is that step's, and what is on the host is
    what it was at capture, an upper bound: num_decodes sequences may be decodes, and any sequence
    may be a chunk if query_start[num_decodes] is above num_decodes, as it never is otherwise.

    scratch: what a backend worked out of all this for one layer, for it to find in the next. So an
    instance serves one step, or one capture of a graph.
    """

    num_decodes: int
    query_start: list[int]
    seq_lens: list[int]
    num_decodes_1: Tensor
    query_start_A: Tensor
    seq_lens_B: Tensor
    block_table_BM: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    scratch: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)


class KVCache(msgspec.Struct, frozen=True):
    """One layer's K and V, each [num_blocks, block_size, kv_heads, head_dim].

    Within a block a backend may keep values in an order of its own; zeros are zeros in any.

    k_scale_NSK, v_scale_NSK: for quantized caches (see `kv_quantization`), what a token's values
    are to be multiplied by, one number for each KV head. All four are contiguous within a block,
    and block_bytes lead from a block to the next: other layers may lie between.
    """

    k_NSKD: Tensor
    v_NSKD: Tensor
    k_scale_NSK: Tensor | None = None
    v_scale_NSK: Tensor | None = None

    def __post_init__(self) -> None:
        block_bytes = self.block_bytes
        for x in (self.k_NSKD, self.v_NSKD, self.k_scale_NSK, self.v_scale_NSK):
            assert x is None or (x[0].is_contiguous() and x.stride(0) * x.itemsize == block_bytes)

    @property
    def block_bytes(self) -> int:
        """Distance from a block's first byte to the next one's."""
        return self.k_NSKD.stride(0) * self.k_NSKD.itemsize


class AttentionSpec(msgspec.Struct, frozen=True):
    """A layer's kind of attention, the same in every step.

    scale: what q k^T is multiplied by, above 0. window: a token attends to itself and the
    window - 1 tokens before it; 0: to all before it (Longformer: Beltagy et al. 2020; Mistral:
    Jiang et al. 2023). softcap: scaled logits become softcap * tanh(logits / softcap); 0: off
    (Gemma 2, 2024).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class Noise(msgspec.Struct, frozen=True):
    """Noise of R rows. temperature_R: float32, 0 is greedy. seed_R, position_R: int64."""

    temperature_R: Tensor
    seed_R: Tensor
    position_R: Tensor

    def of_rows(self, rows: Tensor | slice) -> Noise:
        return Noise(self.temperature_R[rows], self.seed_R[rows], self.position_R[rows])

    def contiguous(self) -> Noise:
        return Noise(*(x.contiguous() for x in (self.temperature_R, self.seed_R, self.position_R)))


class Filters(msgspec.Struct, frozen=True):
    """Sampling filters of R rows. top_k_R: int32, V or more is off. top_p_R, min_p_R: float32.

    In this order: a token stays if its probability, as a share of the best token's, reaches min_p;
    if fewer than top_k are before it; if the probability of those before it, as a share of all that
    stayed so far, is below top_p (1.0 is off). Tokens are ordered by logit, and of equal ones the
    smaller id comes first. The best always stays.
    """

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    def of_rows(self, rows: Tensor | slice) -> Filters:
        return Filters(self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows])


class Replay(Protocol):
    """Captured kernels, to be run again on the inputs of any step."""

    def __call__(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor:
        """Run on a step's inputs; the result is valid until the next call."""
        ...


class QKNorm(msgspec.Struct, frozen=True):
    """Norms of each head of Q and of K. weights: [D]; for their dtype see `Kernels.rms_norm`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Rotary(msgspec.Struct, frozen=True):
    """Rotary embedding (half-split): cos and sin of every position, [L, rotary_dim / 2].

    The first rotary_dim <= D dimensions of a head are turned and the rest passes through (partial
    RoPE, as in Phi). Both have the model's dtype.
    """

    cos: Tensor
    sin: Tensor


class Routing(msgspec.Struct, frozen=True):
    """Choice of experts: a token's C most likely ones, by the softmax of logits_TX in float32.

    Their probabilities, the greatest first, are their weights, rounded to x's dtype; is_normalized:
    divided by their sum before. Of equally likely experts any may come first and be the last one
    chosen (torch.topk, and so transformers, promises nothing); in our kernels the smaller number.
    """

    logits_TX: Tensor
    num_chosen: int
    is_normalized: bool


class SharedExpert(msgspec.Struct, frozen=True):
    """Expert that every token passes beside those it chose: sigmoid(gate_T1) out_TE is added."""

    gate_T1: Tensor
    out_TE: Tensor


class LogprobTensors(msgspec.Struct, frozen=True):
    """Log probabilities, logit - logsumexp(row), of each row's token and the K most likely ones.

    token_ids_NC: int32 [N, 1 + K], the row's own token and then the K first by logit, falling; of
    equal logits the smaller id comes first. logprobs_NC: float32, theirs. rank_N: int32, the own
    token's place in that order, from 1 on.
    """

    token_ids_NC: Tensor
    logprobs_NC: Tensor
    rank_N: Tensor


class Kernels(RankKernels, Protocol):
    """A backend. Activations are in the model's dtype; norms and softmax accumulate in float32.

    Activations are contiguous but for the first dimension. A kernel may write its result over an
    operand where it says so. block_multiple: block sizes must be multiples of it. variant: what
    decides the bits of its results beside its name, e.g. the instruction set. kept_forms: of stored
    weights, those not dequantized. stacks_experts: for one product, and all as floats.
    """

    name: str
    variant: str
    graph_support: GraphSupport
    block_multiple: int
    kept_forms: frozenset[QuantizedForm]
    stacks_experts: bool

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        """The weight of a linear layer or of an embedding, quantized if so asked.

        The backend may keep the weight's tensors: the caller gives them up. A weight in "fp8" is
        for `linear` and `gated_linear`, and one that such products cannot take stays as it is.
        dtype: of activations, for backends that dequantize what is stored quantized.

        Raises ValueError: no such quantization here.
        """
        ...

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b, rounded once to x's dtype; [T, O]. The weight may have segments."""
        ...

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """act(first half) * second half of what `linear` says; [T, O / 2]."""
        ...

    def activate(self, x_TI: Tensor, activation: Activation) -> Tensor:
        """act(x) in x's dtype, for MLPs without a gate; [T, I]."""
        ...

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        """x W^T as float32, [R, O]; with a softcap, softcap * tanh(logits / softcap)."""
        ...

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        """Hidden states of these tokens (int64), [T, E]."""
        ...

    def begin_step(
        self, rows: StepRows, embedding: TokenEmbedding | None
    ) -> tuple[Tensor, Tensor | None]:
        """All that a step on a device beside the host needs before its layers.

        The blocks that rows got are written to the block table. Returns the table of the step's
        sequences, see `AttentionMetadata`, and the hidden states of its tokens if there is an
        embedding.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x [..., E], weight [E]; x's dtype.

        x / rms(x) is float32, rounded to the weight's dtype and then multiplied. So a weight of
        x's dtype rounds before the product, as Llama's and Qwen's norms do, and a float32 weight
        after it, as Gemma's do.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), the sum perhaps over residual; all [T, E]."""
        ...

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """rms_norm(x + residual) of these rows, those that sample; [R, E]. index_R: int64.

        A row may be there more than once.
        """
        ...

    def pack_experts(self, weights: ExpertWeights) -> Experts:
        """All of a layer's experts for `moe`; the caller gives the weights up."""

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """The weighted sum of each token's C experts, gated MLPs, and the shared one; [T, E].

        Under tensor parallelism the inner size is this rank's share; the caller sums over ranks.
        """
        ...

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rotary: Rotary,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm Q and K, turn them by their positions, write K and V to the cache; Q, [T, H, D].

        qkv: [T, (H + 2 K) D], the heads of Q, then of K, then of V; Q may be written over.
        """
        ...

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each query token over its sequence's blocks; [T, H, D].

        All writes to the cache of the step precede it. Rows of padding tokens are zero.
        """
        ...

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the greatest value, its column) of each row, float32 and int64 [R]; V is above 0.

        Of equal values the first. logits_RV: float32, of tokens from first_token on. noise: values
        are logits / temperature plus Gumbel noise of (seed, position, token id), which is the same
        in each backend but for rounding; logits alone where the temperature is 0.

        The column is -1 of a row that has no token, for its greatest value is not finite, or one is
        NaN; the value is not finite either, and NaN if one is. places: columns go there too.

        mask: only tokens that it allows are looked at, in all that is said here.
        """
        ...

    def edit_logits(self, logits_RV: Tensor, edits: LogitEdits) -> None:
        """Change float32 logits of the whole vocabulary as rows ask, in place, in this order.

        All but the allowed tokens become minus infinity; biases are added; before min_tokens stops
        become minus infinity, and so does the last token of each bad sequence if the output ends
        with all tokens before it. Then, of tokens that the row holds, logits above 0 are divided by
        the repetition penalty and others multiplied by it; and those of the output have the
        frequency penalty taken off, times how often it holds them, and the presence penalty.

        What is not finite stays so. The same bits in each backend; the host does not wait.
        """
        ...

    def best_filtered_token(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample as `best_token` with noise, among tokens that filters keep and the mask allows.

        logits_RV: of the whole vocabulary. Temperatures are above 0. The host does not wait.
        Weights exp(logit - best) are float32 and their sums float64 (Triton's: within a thread
        float32), in an order of the backend's own: a cut of top_p that lies so close to a sum that
        their rounding decides may be another one in another backend.
        """
        ...

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors:
        """Log probabilities of each row's token and of the num_top most likely ones, or of all.

        logits_RV: float32, of the whole vocabulary; only read. index_N: int64, which of the rows
        are meant; None: all of them. token_ids_N: int64. The host does not wait. Sums of
        exp(logit - best) are float64, of float32. What is said of a row whose best logit is not
        finite, that has a NaN, or whose token is below 0, means nothing.
        """
        ...

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        """`compute` as a whole that runs without Python, or None if this backend cannot.

        compute calls nothing but this backend's kernels on its operands and views of them; here it
        runs once on operands of max_tokens rows, without meaning.
        """
        ...
