"""Which requests a step's result ends, and the last thing that is said of each.

A request ends at an EOS token or a stop id, but not before its min_tokens, at its length, or
because a row of its logits is not finite: then there is no token, and what was computed of it is
not to be found by others. A row's tokens are looked at in their order, so an end may come in their
middle. An embedding is an end, too, in place of the token that was sampled with it. Called by the
running set. Python runs only for rows that may end.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.messages import Event, FinishReason
from nanocore.worker.plan import NO_TOKEN

End = tuple[Request, Event]

MASKS: Final = (
    "structured_outputs",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "bad_words_token_ids",
)
"""Sampling parameters that may leave no token."""
_NOT_FINITE: Final = (
    "the embedding is not finite (NaN or infinity): the model's weights or the KV cache are "
    "damaged, or its dtype overflows; try --dtype float32"
)
_NO_TOKEN_BYTES: Final = np.array(NO_TOKEN, "<i4").tobytes()


def ends_by_token(
    table: RowTable, sampled: TokenColumns, pooled: dict[int, bytes]
) -> tuple[TokenColumns, dict[int, End]]:
    """The tokens that count, and the ends that they bring, by row; nothing follows a row's end.

    sampled: not yet in the table. pooled: embeddings by row, whose tokens do not count.
    """
    notable = table.may_stop(sampled.token_ids)
    if pooled:
        places = np.isin(sampled.owner_of_each(), list(pooled)).nonzero()[0]
        notable = sorted({*notable, *places.tolist()})
    # Costs next to nothing where there is none. (It may be found across two other ids.)
    if _NO_TOKEN_BYTES in sampled.token_ids.tobytes():
        notable = sorted({*notable, *(sampled.token_ids == NO_TOKEN).nonzero()[0].tolist()})
    if not notable:
        return sampled, {}
    ends: dict[int, End] = {}
    num_kept: dict[int, int] = {}
    for i, (index, place) in zip(notable, sampled.locate(notable), strict=True):
        row, token_id = int(sampled.owners[index]), int(sampled.token_ids[i])
        if row in ends:
            continue
        event = _end(table, row, token_id, place, pooled.get(row))
        if event is None:
            continue
        ends[row] = table.request(row), event
        has_token = token_id != NO_TOKEN and row not in pooled
        if sampled.counts is not None or not has_token:
            num_kept[index] = place + has_token
    return sampled.shortened(num_kept) if num_kept else sampled, ends


def ends_by_length(table: RowTable, rows: list[int]) -> dict[int, End]:
    """Those of the rows that have all their tokens."""
    ends = {}
    for row in rows:
        request = table.request(row)
        if table.num_tokens[row] == request.max_num_tokens:
            ends[row] = request, Event(handle=request.handle, finish_reason="length")
    return ends


def end_by_stop(request: Request, token_id: int, number: int) -> Event | None:
    """What output token `number`, from 1, ends a request with, if it is one to stop at."""
    if number <= request.sampling.min_tokens:
        return None
    is_eos = token_id in request.eos_token_ids
    if is_eos or token_id in request.sampling.stop_token_ids:
        stop_reason = None if is_eos else token_id
        return Event(handle=request.handle, finish_reason="stop", stop_reason=stop_reason)
    return None


def end_outside_a_step(request: Request, reason: FinishReason, message: str | None) -> Event:
    """An abort, or an error; that of a grammar that cannot be followed further is the request's."""
    is_invalid = reason == "error" and request.matcher is not None and request.matcher.failure
    return Event(
        handle=request.handle,
        finish_reason=reason,
        message=message,
        code="invalid_request" if is_invalid else None,
    )


def _end(
    table: RowTable, row: int, token_id: int, place: int, embedding: bytes | None
) -> Event | None:
    """What this token, `place` tokens after the row's known ones, ends the row with, if it does."""
    request = table.request(row)
    number = int(table.num_tokens[row]) + place - request.num_prompt_tokens + 1
    if token_id == NO_TOKEN:
        return _end_without_token(request, number)
    if embedding is not None:
        if np.isfinite(np.frombuffer(embedding, "<f4")).all():
            return Event(handle=request.handle, finish_reason="stop", embedding=embedding)
        return Event(handle=request.handle, finish_reason="error", message=_NOT_FINITE)
    return end_by_stop(request, token_id, number)


def _end_without_token(request: Request, number: int) -> Event:
    """The end of a request that gets no output token of this number, from 1."""
    masks = [name for name in MASKS if getattr(request.sampling, name)]
    if masks:
        message = (
            f"no token is left to choose for output token {number}: {', '.join(masks)} of this "
            "request forbid all, so relax them; or the model's logits are not finite (NaN)"
        )
    else:
        message = (
            f"the logits of output token {number} are not finite (NaN or infinity): the model's "
            "weights or the KV cache are damaged, or its dtype overflows; try --dtype float32"
        )
    return Event(
        handle=request.handle,
        finish_reason="error",
        message=message,
        code="invalid_request" if masks else None,
    )
