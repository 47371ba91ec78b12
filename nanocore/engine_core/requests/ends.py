"""Stop checks: which requests end with a step's result, and their final event.

In this order: min_tokens, EOS, stop ids, length. A request also ends when it gets no token because
its logits are not finite; then its blocks must not be found by others. An embedding ends a request,
too, in place of the token that was sampled with it. With several tokens a row they are checked in
order, so an end may come in their middle. Python runs only for rows that may end.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.columns import TokenColumns
from nanocore.engine_core.scheduling.row_table import RowTable
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
    """Return the tokens that count, cut after a row's end, and the ends by row.

    Args:
        sampled: tokens that are not in the table yet.
        pooled: embeddings by row; the tokens of these rows do not count.
    """
    notable = table.may_stop(sampled.token_ids)
    if pooled:
        places = np.isin(sampled.owner_of_each(), list(pooled)).nonzero()[0]
        notable = sorted({*notable, *places.tolist()})
    # A search of bytes is the cheapest test. It may match across two ids, hence the second look.
    if _NO_TOKEN_BYTES in sampled.token_ids.tobytes():
        notable = sorted({*notable, *(sampled.token_ids == NO_TOKEN).nonzero()[0].tolist()})
    if not notable:
        return sampled, {}
    ends: dict[int, End] = {}
    num_kept: dict[int, int] = {}
    for i, (index, place) in zip(notable, sampled.locate(notable), strict=True):
        row, token_id = int(sampled.owners[index]), int(sampled.token_ids[i])
        if row in ends:  # an earlier token of this step has ended it
            continue
        event = _end(table, row, token_id, place, pooled.get(row))
        if event is None:
            continue
        ends[row] = table.request(row), event
        # A stop token is delivered; NO_TOKEN and what was sampled beside an embedding are not.
        has_token = token_id != NO_TOKEN and row not in pooled
        if sampled.counts is not None or not has_token:
            num_kept[index] = place + has_token
    return sampled.shortened(num_kept) if num_kept else sampled, ends


def ends_by_length(table: RowTable, rows: list[int]) -> dict[int, End]:
    """Return the ends of those rows that have reached their length."""
    ends = {}
    for row in rows:
        request = table.request(row)
        if table.num_tokens[row] == request.max_num_tokens:
            ends[row] = request, Event(handle=request.handle, finish_reason="length")
    return ends


def end_by_stop(request: Request, token_id: int, number: int) -> Event | None:
    """Return the end event if output token `number`, from 1, is EOS or a stop id."""
    # It is not sampled before min_tokens, because it is masked; resumed outputs may have it.
    if number <= request.sampling.min_tokens:
        return None
    is_eos = token_id in request.eos_token_ids
    if is_eos or token_id in request.sampling.stop_token_ids:
        stop_reason = None if is_eos else token_id
        return Event(handle=request.handle, finish_reason="stop", stop_reason=stop_reason)
    return None


def end_outside_a_step(request: Request, reason: FinishReason, message: str | None) -> Event:
    """Make the event of an abort or an error. A grammar that fails is the request's own fault."""
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
    """Return the end that this token brings, if any. place: its index after the known tokens."""
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
