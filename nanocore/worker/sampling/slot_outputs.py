"""What is reported of a step's slots beside sampled tokens: log probabilities and embeddings.

A slot is a row, a position, and the token of the step before it. First come those that are sampled;
then those that are scored, prompt tokens whose log probabilities are asked for; then those whose
hidden state is pooled. Where no row asks for anything, nothing is made; what follows from which
rows decode is kept for as long as they do. Everything is computed behind all else in the step, from
the model's own logits, without waiting for a device, and becomes columns once it is on the host.

Requests for about as many tokens are computed together, so that a row which wants the whole
vocabulary costs its neighbours nothing. An embedding is the hidden state of one prompt token after
the last norm, or the mean of several. They are added up in integers, exactly, chunk by chunk: a
mean has the same bits however its prompt was cut into chunks, whoever ran beside it, and in
whatever order a device adds. A number is split into two with a fixed point; together they keep
2**-56 and hold millions of tokens.

Shape suffixes: see `nanocore.kernels.interface`; further, N slots, S of them sampled, J whose log
probabilities are computed, Q pooled ones of K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.sampling import LogprobTensors, TokenPlaces
from nanocore.worker.plan import NewRow, RowLogprobs
from nanocore.worker.sampling.sampler import TokenSampler

MAX_ROWS: Final = 64
"""Slots whose logits are computed together, besides those that sample: it bounds memory."""
MAX_POOLED_TOKENS: Final = 128
"""Added up at once: it bounds memory."""

_NOT_REQUESTED: Final = -1
_FEW: Final = 63
"""Up to this many tokens a request's size makes no difference."""
_SCORED: Final = 64
"""Above every size: what is scored is of another kind."""
_HIGH, _LOW = 2.0**16, 2.0**40
_LIMIT: Final = 2.0**23
"""No norm gives such numbers: from here on they count as not finite."""
_FIELDS: Final = LogprobTensors.__struct_fields__
_POOLED: Final = "pooled"

Ints = NDArray[np.int64]


class LogprobGroup(msgspec.Struct, frozen=True):
    """Entries from start to stop, in the order in which they are computed, with num_top tokens."""

    start: int
    stop: int
    num_top: int
    is_scored: bool

    def slices(self) -> Iterator[slice]:
        for start in range(self.start, self.stop, MAX_ROWS):
            yield slice(start, min(start + MAX_ROWS, self.stop))

    def key(self, field: str) -> str:
        return f"{field}.{self.start}"


class LogprobSlots:
    """Slots whose log probabilities are computed, in that order: group by group.

    Args:
        slots_J: rising, which of the slots. num_top_J: how many of the most likely tokens each asks
        for. num_sampled: slots before the first that is scored.
    """

    def __init__(self, slots_J: Ints, num_top_J: Ints, num_sampled: int) -> None:
        is_scored_J = slots_J >= num_sampled
        sizes_J = np.frexp(np.maximum(num_top_J, _FEW))[1]  # of a group, at most twice the least
        kinds_J = np.where(is_scored_J, sizes_J + _SCORED, sizes_J)
        order = kinds_J.argsort(kind="stable")
        self.slots_J, self.num_top_J, kinds_J = slots_J[order], num_top_J[order], kinds_J[order]
        starts = np.flatnonzero(np.diff(kinds_J, prepend=-1)).tolist()
        self.groups = [
            LogprobGroup(
                start, stop, int(self.num_top_J[start:stop].max()), kinds_J[start] >= _SCORED
            )
            for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)
        ]

    def columns(
        self,
        is_scored: bool,
        rows_N: Ints,
        is_kept_N: NDArray[np.bool_],
        found: Mapping[str, Tensor],
    ) -> RowLogprobs | None:
        """Columns of the kept slots of one kind, in their order; None if there is none.

        found: by `LogprobGroup.key`, on the host; empty on ranks that do not report.
        """
        groups = [group for group in self.groups if group.is_scored == is_scored]
        is_kept_J = is_kept_N[self.slots_J]
        kept = [g.start + is_kept_J[g.start : g.stop].nonzero()[0] for g in groups]
        if not found or not sum(map(len, kept)):
            return None
        slots = np.sort(np.concatenate([self.slots_J[own] for own in kept]))
        counts = np.empty(len(slots), np.int64)
        places = [slots.searchsorted(self.slots_J[own]) for own in kept]
        for own, place in zip(kept, places, strict=True):
            counts[place] = 1 + self.num_top_J[own]
        ends = counts.cumsum()
        ranks = np.empty(len(slots), "<i4")
        token_ids, logprobs = np.empty(ends[-1], "<i4"), np.empty(ends[-1], "<f4")
        for group, own, place in zip(groups, kept, places, strict=True):
            ids_NC, logprobs_NC, rank_N = (
                found[group.key(field)].numpy()[own - group.start] for field in _FIELDS
            )
            columns = np.arange(1 + group.num_top)
            is_asked = columns < counts[place, None]
            to = ((ends - counts)[place, None] + columns)[is_asked]
            ranks[place] = rank_N
            token_ids[to], logprobs[to] = ids_NC[is_asked], logprobs_NC[is_asked]
        return RowLogprobs(
            rows=rows_N[slots].astype("<i4").tobytes(),
            ranks=ranks.tobytes(),
            counts=counts.astype("<i4").tobytes(),
            token_ids=token_ids.tobytes(),
            logprobs=logprobs.tobytes(),
        )


class WantedPrompt(msgspec.Struct):
    """A prompt's tokens from position start to stop, whose hidden states are looked at.

    num_top: of scored ones. sums: of pooled ones, over those whose steps are done.
    """

    row: int
    start: int
    stop: int
    num_top: int = 0
    sums: NDArray[np.int64] | int = 0

    def mean(self) -> NDArray[np.float32]:
        """Mean of all tokens, [E]; NaN if some hidden state is not finite."""
        assert not isinstance(self.sums, int), "there is a token at least"
        high, low = np.split(self.sums[:-1], 2)
        mean = (high / _HIGH + low / (_HIGH * _LOW)) / (self.stop - self.start)
        return np.where(self.sums[-1] == 0, mean, np.nan).astype("<f4")


class SlotOutputs(msgspec.Struct, frozen=True):
    """What is reported of a step's slots.

    rows, positions, index: of the slots that are not sampled, scored ones first.
    pooled: rows of whose tokens some are pooled in this step; owner_Q: which of the K each is of;
    done: of each row, whether that is all.
    """

    rows: Ints
    positions: Ints
    index: Ints
    logprobs: LogprobSlots | None
    pooled: list[WantedPrompt]
    owner_Q: Ints
    done: list[bool]

    @property
    def needs_hidden(self) -> bool:
        """Whether there are slots that are not sampled."""
        return len(self.rows) > 0

    def columns(self) -> dict[str, NDArray]:
        """Columns that a device needs beside the slots."""
        columns: dict[str, NDArray] = {"owner_Q": self.owner_Q}
        if self.logprobs is not None:
            columns["logprob_slots_J"] = self.logprobs.slots_J
        return columns

    def compute(
        self,
        sampler: TokenSampler,
        fields: Mapping[str, Tensor],
        places: TokenPlaces,
        logits_SV: Tensor,
        hidden_NE: Tensor | None,
        logits: Callable[[Tensor], Tensor],
        scale: float,
    ) -> dict[str, Tensor]:
        """Compute it where the model runs, by name; empty on ranks that do not report.

        fields: the step's columns. places: of all slots; what is sampled is in the table.
        logits_SV: this rank's, of sampled slots. hidden_NE: of all slots, if some are not sampled.
        logits: of hidden states [R, E]. scale: what undoes the last norm's divisor.
        """
        found: dict[str, Tensor] = {}
        if self.logprobs is not None:
            slots_J = fields["logprob_slots_J"]
            token_ids_J = places.of_rows(slots_J).read()
            for group in self.logprobs.groups:
                parts = []
                for some in group.slices():
                    of_logits, index = logits_SV, None
                    if group.is_scored:
                        assert hidden_NE is not None, "the step computed them"
                        of_logits = logits(hidden_NE.index_select(0, slots_J[some]))
                    else:
                        index = slots_J[some]
                    parts.append(
                        sampler.logprobs(of_logits, token_ids_J[some], group.num_top, index)
                    )
                for field in _FIELDS:
                    tensors = [getattr(part, field) for part in parts if part is not None]
                    if tensors:
                        found[group.key(field)] = (
                            tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                        )
        if self.pooled:
            assert hidden_NE is not None, "the step computed them"
            pooled_QE = hidden_NE[len(hidden_NE) - len(self.owner_Q) :]
            found[_POOLED] = pooled_sums(pooled_QE, fields["owner_Q"], len(self.pooled), scale)
        return found

    def reported(
        self, sampled_rows: Ints, is_given_S: NDArray[np.bool_], found: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Turn found tensors, on the host, into the fields of `ModelRunnerOutput` that have them.

        sampled_rows: of the sampled slots; is_given_S: those whose tokens are delivered.
        """
        fields: dict[str, Any] = {}
        if self.logprobs is not None:
            tensors = {name: tensor for name, tensor in found.items() if "." in name}
            rows_N = np.concatenate((sampled_rows, self.rows))
            is_kept_N = np.concatenate((is_given_S, np.ones(len(self.rows), bool)))
            for name, is_scored in (("logprobs", False), ("prompt_logprobs", True)):
                fields[name] = self.logprobs.columns(is_scored, rows_N, is_kept_N, tensors)
        if self.pooled:
            rows, means = [], []
            sums_KI = found[_POOLED].numpy()
            for pooled, sums_I, is_done in zip(self.pooled, sums_KI, self.done, strict=True):
                pooled.sums = pooled.sums + sums_I
                if is_done:
                    rows.append(pooled.row)
                    means.append(pooled.mean().tobytes())
            fields["pooled_rows"] = np.array(rows, "<i4").tobytes()
            fields[_POOLED] = b"".join(means)
        return fields


class OutputRows:
    """What the rows of the persistent batch are to report; where no row asks, nothing is made.

    Args:
        num_rows: of the batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows, _NOT_REQUESTED, np.int64)
        self._num_requesting = 0
        self._scored: dict[int, WantedPrompt] = {}
        self._pooled: dict[int, WantedPrompt] = {}
        self._kept: dict[int, SlotOutputs | None] = {}
        """By group, what steady steps report."""

    def remove(self, rows: NDArray[np.integer]) -> None:
        self._kept.clear()
        self._num_requesting -= int((self._num_top[rows] != _NOT_REQUESTED).sum())
        self._num_top[rows] = _NOT_REQUESTED
        for row in rows.tolist():
            self._scored.pop(row, None)
            self._pooled.pop(row, None)

    def add(self, new: NewRow) -> None:
        self._kept.clear()
        sampling, row, stop = new.sampling, new.row, new.num_prompt_tokens
        if sampling.logprobs is not None:
            self._num_top[row] = self._number(sampling.logprobs)
            self._num_requesting += 1
        start = new.num_prompt_logprobs
        if sampling.prompt_logprobs is not None and start < stop - 1:
            assert new.num_computed_tokens <= start, (
                f"row {row}: {new.num_computed_tokens} tokens are computed, of which {start} have "
                "prompt log probabilities"
            )
            number = self._number(sampling.prompt_logprobs)
            self._scored[row] = WantedPrompt(row, start, stop - 1, number)
        if sampling.pooling is not None:
            start = 0 if sampling.pooling == "mean" else stop - 1
            assert new.num_computed_tokens <= start, (
                f"row {row}: {new.num_computed_tokens} tokens are computed, and it needs those "
                f"from {start} on"
            )
            self._pooled[row] = WantedPrompt(row, start, stop)

    def of_step(
        self,
        sample_rows: Ints,
        decode_group: int | None,
        rows_B: Ints,
        counts_B: Ints,
        seq_lens_B: Ints,
    ) -> SlotOutputs | None:
        """Select a step's slots; call once for each step, in order: see `BatchStep`.

        decode_group: the sampled rows are all of this group. A prompt is forgotten with the last
        token that it wants.
        """
        if not (self._num_requesting or self._scored or self._pooled):
            return None
        is_steady = decode_group is not None and not (self._scored or self._pooled)
        if is_steady and decode_group in self._kept:
            return self._kept[decode_group]
        computed = rows_B, counts_B, seq_lens_B
        scored, pooled = _take(self._scored, *computed), _take(self._pooled, *computed)
        num_top_J = np.concatenate(
            [self._num_top[sample_rows], *(np.full(len(p), w.num_top) for w, p, _ in scored)]
        )
        slots_J = np.flatnonzero(num_top_J != _NOT_REQUESTED)
        outputs = None
        if len(slots_J) or pooled:
            positions = [p + 1 for _, p, _ in scored] + [p for _, p, _ in pooled]
            outputs = SlotOutputs(
                rows=_joined([np.full(len(p), w.row) for w, p, _ in scored + pooled]),
                positions=_joined(positions),
                index=_joined([index for *_, index in scored + pooled]),
                logprobs=LogprobSlots(slots_J, num_top_J[slots_J], len(sample_rows))
                if len(slots_J)
                else None,
                pooled=[wanted for wanted, *_ in pooled],
                owner_Q=_joined([np.full(len(p), k) for k, (_, p, _) in enumerate(pooled)]),
                done=[int(p[-1]) + 1 == wanted.stop for wanted, p, _ in pooled],
            )
        if is_steady:
            assert decode_group is not None
            self._kept[decode_group] = outputs
        return outputs

    def _number(self, requested: int) -> int:
        return self._vocab_size if requested < 0 else min(requested, self._vocab_size)


def _take(
    wanted: dict[int, WantedPrompt], rows_B: Ints, counts_B: Ints, seq_lens_B: Ints
) -> list[tuple[WantedPrompt, Ints, Ints]]:
    """Find each prompt of which a step computes wanted tokens; their positions and indices in T."""
    if not wanted:
        return []
    found = []
    starts_B = seq_lens_B - counts_B
    offsets_B = counts_B.cumsum() - seq_lens_B  # from a position to one of the T
    for i, row in enumerate(rows_B.tolist()):
        prompt = wanted.get(row)
        if prompt is None:
            continue
        stop = min(int(seq_lens_B[i]), prompt.stop)
        positions = np.arange(max(int(starts_B[i]), prompt.start), stop)
        if len(positions):
            found.append((prompt, positions, positions + offsets_B[i]))
        if stop == prompt.stop:
            del wanted[row]
    return found


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def pooled_sums(hidden_QE: Tensor, owner_Q: Tensor, num_rows: int, scale: float = 1.0) -> Tensor:
    """The sums of each row's hidden states, int64 [K, 2E + 1]; last, how many are not finite.

    owner_Q: int64, which of the K. scale: hidden states are multiplied by it.
    """
    size = 2 * hidden_QE.shape[1] + 1
    sums_KI = hidden_QE.new_zeros((num_rows, size), dtype=torch.int64)
    for start in range(0, len(hidden_QE), MAX_POOLED_TOKENS):
        some = slice(start, start + MAX_POOLED_TOKENS)
        x_QE = hidden_QE[some].double() * scale
        is_bad_QE = ~(x_QE.abs() < _LIMIT)  # NaN is not
        x_QE = x_QE.masked_fill_(is_bad_QE, 0.0).mul_(_HIGH)
        high_QE = x_QE.trunc()
        low_QE = x_QE.sub_(high_QE).mul_(_LOW)
        num_bad_Q1 = is_bad_QE.any(dim=1, keepdim=True).double()
        numbers_QI = torch.cat((high_QE, low_QE, num_bad_Q1), dim=1).long()
        sums_KI.index_add_(0, owner_Q[some], numbers_QI)
    return sums_KI
