"""Log probabilities and embeddings of a step's tokens, from the model's own logits.

They are computed behind all else in the step, on a device like on the host, and without waiting for
either, and become columns once the step's result is on the host. Ranks exchange their logits, as
for rows that are processed; the first rank of the stage, whose result is the step's, computes the
rest. Shape suffixes: see `requested_outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import LogprobTensors
from nanocore.worker.plan import RowLogprobs
from nanocore.worker.sampling.requested_outputs import (
    LogprobRequests,
    RequestedOutputs,
    pooled_sums,
)
from nanocore.worker.sampling.sampler import TokenSampler

_SAMPLED, _PROMPT, _POOLED = "logprobs", "prompt_logprobs", "pooled"
_FIELDS: Final = LogprobTensors.__struct_fields__


class Sampled(msgspec.Struct, frozen=True):
    """Result of a step: logits, and each row's token, int64.

    hidden_NE: hidden states of the tokens that `RequestedOutputs.hidden_index` names.
    """

    logits_RV: Tensor
    token_ids_R: Tensor
    hidden_NE: Tensor | None = None


class OutputComputer(msgspec.Struct, frozen=True):
    """Computes them. logits: of hidden states [R, E], this rank's part of the vocabulary.

    logits_divisor: by which the last norm divides hidden states, see `DecoderModel.pack`.
    """

    sampler: TokenSampler
    logits: Callable[[Tensor], Tensor]
    logits_divisor: float = 1.0

    def compute(
        self, requested: RequestedOutputs, column: Tensor, result: Sampled, token_table: Tensor
    ) -> dict[str, Tensor]:
        """Compute the requested outputs, by name; empty on ranks that do not report.

        column: that of `requested`, where the model runs. token_table: int32, the rows' tokens.
        """
        sampled_1N, prompt_3N, pooled_2N = requested.split(column)
        found: dict[str, Tensor] = {}
        if requested.sampled is not None:
            index_N = sampled_1N[0]
            found |= self._of_entries(
                requested.sampled,
                _SAMPLED,
                lambda some: (result.logits_RV, index_N[some]),
                result.token_ids_R[index_N],
            )
        if requested.prompt is not None:
            prompt_NE = result.hidden_NE
            assert prompt_NE is not None, "the step computed them"
            _, rows_N, positions_N = prompt_3N
            found |= self._of_entries(
                requested.prompt,
                _PROMPT,
                lambda some: (self.logits(prompt_NE[some]), None),
                token_table[rows_N, positions_N].long(),
            )
        if requested.pooled is not None:
            assert result.hidden_NE is not None, "the step computed them"
            found[_POOLED] = pooled_sums(
                result.hidden_NE[prompt_3N.shape[1] :],
                pooled_2N[1],
                len(requested.pooled.rows),
                self.logits_divisor,
            )
        return found

    def _of_entries(
        self,
        entries: LogprobRequests,
        name: str,
        logits_of: Callable[[slice], tuple[Tensor, Tensor | None]],
        token_ids_N: Tensor,
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, group in enumerate(entries.groups):
            parts = []
            for some in group.slices():
                logits_RV, index = logits_of(some)
                part = self.sampler.logprobs(logits_RV, token_ids_N[some], group.num_top, index)
                parts.append(part)
            for field in _FIELDS:
                tensors = [getattr(part, field) for part in parts if part is not None]
                if tensors:
                    found[_key(name, number, field)] = _joined(tensors)
        return found


class RequestedColumns(msgspec.Struct, frozen=True):
    """The fields of `ModelRunnerOutput` that have them."""

    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    pooled_rows: bytes = b""
    pooled: bytes = b""


def requested_columns(
    requested: RequestedOutputs | None, found: Mapping[str, Tensor], has_token_R: NDArray[np.bool_]
) -> RequestedColumns:
    """Turn found tensors, on the host, into columns.

    has_token_R: rows of the step that sampled a token; the others have no entry.
    """
    if requested is None:
        return RequestedColumns()
    sampled = None
    if requested.sampled is not None:
        has_token_N = np.empty(len(requested.sampled.rows), bool)
        has_token_N[requested.sampled.order] = has_token_R[requested.sampled.columns[0]]
        sampled = _in_columns(requested.sampled, _SAMPLED, found, has_token_N)
    prompt = None
    if requested.prompt is not None:
        is_kept_N = np.ones(len(requested.prompt.rows), bool)
        prompt = _in_columns(requested.prompt, _PROMPT, found, is_kept_N)
    pooled = (b"", b"")
    if requested.pooled is not None:
        pooled = requested.pooled.take(found[_POOLED].numpy())
    return RequestedColumns(sampled, prompt, *pooled)


def _in_columns(
    entries: LogprobRequests, name: str, found: Mapping[str, Tensor], is_kept_N: NDArray[np.bool_]
) -> RowLogprobs | None:
    """Columns of the kept entries, in their order; None on ranks that do not report."""
    if _key(name, 0, _FIELDS[0]) not in found or not is_kept_N.any():
        return None
    counts = 1 + entries.num_top[is_kept_N]
    ends = np.cumsum(counts)
    places_N = np.cumsum(is_kept_N) - 1
    ranks = np.empty(len(counts), "<i4")
    token_ids, logprobs = np.empty(ends[-1], "<i4"), np.empty(ends[-1], "<f4")
    for number, group in enumerate(entries.groups):
        ids_NC, logprobs_NC, rank_N = (
            found[_key(name, number, field)].numpy() for field in _FIELDS
        )
        members = entries.order[group.start : group.stop]
        is_kept = is_kept_N[members]
        places = places_N[members[is_kept]]
        ranks[places] = rank_N[is_kept]
        columns = np.arange(1 + group.num_top)
        is_asked = columns < counts[places, None]
        to = ((ends - counts)[places, None] + columns)[is_asked]
        token_ids[to] = ids_NC[is_kept][is_asked]
        logprobs[to] = logprobs_NC[is_kept][is_asked]
    return RowLogprobs(
        rows=entries.rows[is_kept_N].astype("<i4").tobytes(),
        ranks=ranks.tobytes(),
        counts=counts.astype("<i4").tobytes(),
        token_ids=token_ids.tobytes(),
        logprobs=logprobs.tobytes(),
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _key(name: str, group: int, field: str) -> str:
    return f"{name}.{group}.{field}"
