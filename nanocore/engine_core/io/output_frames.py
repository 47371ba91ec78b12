"""Encodes one client's share of a step as OUTPUT messages: one, unless it is too large.

A frame above `max_frame_bytes` would end the client's connection. With a whole vocabulary each
token brings megabytes of log probabilities, and each end of some requests an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from nanocore.engine_core.requests.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.columns import (
    IntArray,
    LogprobColumns,
    TokenColumns,
    places_of,
)
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Output, TokenLogprobs

HANDLE_DTYPE: Final = np.dtype("<u4")
FLOAT_DTYPE: Final = np.dtype("<f4")
MAX_LOGPROBS_BYTES: Final = 2**19
"""Limit per message; one more token's logprobs may be in it, less than 8 MiB in any vocabulary."""


def output_frames(
    output: ClientOutput, max_logprobs_bytes: int = MAX_LOGPROBS_BYTES
) -> list[list[bytes]]:
    """Encode an output as messages, in order; usually one, with two buffer copies.

    If there are several, prompts' log probabilities come first, tokens' with their tokens, and ends
    last; of these the embeddings come last.
    """
    if output.num_logprobs_bytes <= max_logprobs_bytes:
        return [_encode(output)]
    client, nothing = output.client, TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
    prompts = [
        ClientOutput(client, nothing, [], part)
        for part in _cut_entries(output.prompt_logprobs, max_logprobs_bytes)
    ]
    outputs = [
        ClientOutput(client, part) for part in _cut_tokens(output.tokens, max_logprobs_bytes)
    ]
    ends = [event for event in output.events if event.embedding is not None]
    for event in output.events:
        if event.embedding is None:
            outputs[0 if event.finish_reason is None else -1].events.append(event)
    num_bytes = np.array([len(event.embedding or b"") for event in ends], np.int64)
    embeddings = [
        ClientOutput(client, nothing, [ends[i] for i in part])
        for part in _cut(num_bytes, max_logprobs_bytes)
        if len(part)
    ]
    return [_encode(one) for one in prompts + outputs + embeddings]


def _encode(output: ClientOutput) -> list[bytes]:
    tokens, counts, prompts = output.tokens, output.tokens.counts, output.prompt_logprobs
    return encode(
        Output(
            handles=tokens.owners.astype(HANDLE_DTYPE, copy=False).tobytes(),
            tokens=tokens.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
            counts=None if counts is None else counts.astype(HANDLE_DTYPE).tobytes(),
            events=output.events,
            logprobs=None if tokens.logprobs is None else _said(tokens.logprobs),
            prompt_logprobs=None if prompts is None else _said(prompts),
        )
    )


def _said(entries: LogprobColumns) -> TokenLogprobs:
    return TokenLogprobs(
        handles=entries.owners.astype(HANDLE_DTYPE, copy=False).tobytes(),
        ranks=entries.ranks.astype(HANDLE_DTYPE).tobytes(),
        counts=entries.counts.astype(HANDLE_DTYPE).tobytes(),
        token_ids=entries.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
        logprobs=entries.logprobs.astype(FLOAT_DTYPE, copy=False).tobytes(),
    )


def _cut_entries(entries: LogprobColumns | None, max_bytes: int) -> Iterator[LogprobColumns]:
    if entries is not None:
        yield from map(entries.take, _cut(entries.bytes_of_each, max_bytes))


def _cut_tokens(tokens: TokenColumns, max_bytes: int) -> Iterator[TokenColumns]:
    """Yield tokens with their logprobs in parts, at least one."""
    entries, owners = tokens.logprobs, tokens.owner_of_each().astype(np.int64)
    if entries is None:
        yield tokens
        return
    owner_of_each = places_of(entries.owners, tokens.owners)
    entries = entries.take(np.argsort(owner_of_each, kind="stable"))  # as the tokens are
    has_entry = np.isin(owners, entries.owners)
    entry_of_each = np.cumsum(has_entry) - 1
    num_bytes = np.zeros(len(owners), np.int64)
    num_bytes[has_entry] = entries.bytes_of_each
    for part in _cut(num_bytes, max_bytes):
        starts = np.flatnonzero(np.diff(owners[part], prepend=-1))
        own = entry_of_each[part][has_entry[part]]
        yield TokenColumns(
            owners[part][starts],
            tokens.token_ids[part],
            np.diff(starts, append=len(part)),
            entries.take(own) if len(own) else None,
        )


def _cut(num_bytes: IntArray, max_bytes: int) -> list[IntArray]:
    """Split indices into consecutive parts of max_bytes and at most one entry more."""
    part_of_each = (np.cumsum(num_bytes) - num_bytes) // max_bytes
    return np.split(np.arange(len(num_bytes)), np.flatnonzero(np.diff(part_of_each)) + 1)
