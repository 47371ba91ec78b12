"""Log probabilities as OpenAI's chat has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nanocore.client.requests.logprob_views import Logprob

MAX_TOP_LOGPROBS: Final = 20
"""Of a token of a conversation."""
LEAST: Final = -9999.0
"""What JSON has no number for, minus infinity, is this (as in OpenAI's API)."""


def finite(logprob: float) -> float:
    """As JSON can have it."""
    return max(logprob, LEAST)


def chat_logprobs(
    tokens: Sequence[Mapping[int, Logprob]], num_top: int, as_token_ids: bool = False
) -> list[dict[str, Any]]:
    """Of each token: itself, and the most likely ones there.

    as_token_ids: tokens are called "token_id:ID", for texts of single tokens may be alike.
    """
    entries = []
    for candidates in tokens:
        own = next(iter(candidates.items()))
        top = sorted(candidates.items(), key=lambda item: item[1].rank)[:num_top]
        entry = _entry(*own, as_token_ids)
        entry["top_logprobs"] = [_entry(*item, as_token_ids) for item in top]
        entries.append(entry)
    return entries


def prompt_logprobs(
    tokens: Sequence[Mapping[int, Logprob] | None],
) -> list[dict[str, Any] | None]:
    """Of each prompt token, as vLLM shows them: by token id; of the first one null."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in candidates.items()
        }
        for candidates in tokens
    ]


def token_name(token_id: int, found: Logprob, as_token_ids: bool) -> str:
    """What a token is called."""
    return f"token_id:{token_id}" if as_token_ids else found.decoded_token or ""


def _entry(token_id: int, found: Logprob, as_token_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(token_id, found, as_token_ids),
        "logprob": finite(found.logprob),
        "bytes": [*(found.bytes or b"")],
    }
