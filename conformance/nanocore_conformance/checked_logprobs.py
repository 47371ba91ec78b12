"""What an engine said of log probabilities, held against the rules for all of them.

Of each token as many candidates as were asked for, itself first, the most likely ones in falling
order, a rank that agrees with them, and probabilities that add up to at most one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from nanocore.protocol.codec import unpack_logprobs
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import TokenLogprobs
from nanocore_conformance.report import BrokenError, require

TOLERANCE = 1e-2
"""Tolerance for sums of probabilities: engines compute in float32 or less."""


@dataclass(frozen=True)
class TokenEntry:
    """One token's. candidates: (token id, log probability), the token itself first."""

    rank: int
    candidates: list[tuple[int, float]]


def entries_by_handle(columns: TokenLogprobs | None) -> dict[int, list[TokenEntry]]:
    """The entries of each handle, in their order.

    Raises:
        BrokenError: the columns do not fit together.
    """
    found: dict[int, list[TokenEntry]] = {}
    if columns is None:
        return found
    try:
        handles, ranks, counts, token_ids, logprobs = unpack_logprobs(columns)
    except ProtocolError as error:
        raise BrokenError("columns of log probabilities that fit together", error) from None
    start = 0
    for handle, rank, count in zip(handles, ranks, counts, strict=True):
        end = start + count
        candidates = [*zip(token_ids[start:end], logprobs[start:end], strict=True)]
        found.setdefault(handle, []).append(TokenEntry(rank, candidates))
        start = end
    return found


def check_entry(entry: TokenEntry, token_id: int, num_asked: int, vocab_size: int) -> None:
    """Raise unless this is a token's entry.

    num_asked: the request's `logprobs`; -1 for all.
    """
    num_likely = vocab_size if num_asked < 0 else min(num_asked, vocab_size)
    (own_id, own), *likely = entry.candidates
    require(own_id == token_id, f"the token itself, {token_id}, as first candidate", own_id)
    got = f"{len(entry.candidates)} candidates"
    require(len(likely) == num_likely, f"1 + {num_likely} candidates", got)
    ids, logprobs = [token for token, _ in likely], [logprob for _, logprob in likely]
    require(len({*ids}) == len(ids), "each of the most likely tokens once", ids)
    valid = all(0 <= token < vocab_size for token in ids)
    require(valid, f"candidates below vocab_size={vocab_size}", ids)
    falling = all(first >= second for first, second in itertools.pairwise(logprobs))
    require(falling, "the most likely tokens in falling order", logprobs)
    possible = all(logprob <= TOLERANCE for logprob in (own, *logprobs))  # NaN is not
    require(possible, "logarithms of probabilities, none above 0", [own, *logprobs])
    _check_sum(logprobs, whole=num_likely == vocab_size)
    _check_rank(entry, likely, vocab_size)


def _check_sum(logprobs: list[float], whole: bool) -> None:
    total = math.fsum(map(math.exp, logprobs))
    require(total <= 1 + TOLERANCE, "probabilities of at most 1 together", total)
    if whole:
        require(total >= 1 - TOLERANCE, "probabilities of 1 together, of all tokens", total)


def _check_rank(entry: TokenEntry, likely: list[tuple[int, float]], vocab_size: int) -> None:
    token_id, own = entry.candidates[0]
    places = [place for place, (token, _) in enumerate(likely, 1) if token == token_id]
    if places:
        require(entry.rank == places[0], f"rank {places[0]}, its place", entry.rank)
        require(likely[places[0] - 1][1] == own, "the same log probability twice", likely)
        return
    lowest = len(likely) + 1
    require(lowest <= entry.rank <= vocab_size, f"a rank of {lowest} or more", entry.rank)
    if likely:
        require(own <= likely[-1][1], f"at most {likely[-1][1]}, because it is no candidate", own)
