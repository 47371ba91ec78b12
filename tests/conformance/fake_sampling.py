"""How the fake model chooses a token where a request asks for more than the best one.

Its logits fall from a token that prompt, position and seed decide; PROTOCOL.md's section 9, in
plain Python, changes them. A defect is a name that stands beside what it breaks.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

from nanocore.protocol.messages import TokenLogprobs
from nanocore.protocol.sampling import EngineSamplingParams

STEEPNESS = 0.5
"""How much less the logit of the next best token is."""


def logits_of(best: int, vocab_size: int) -> list[float]:
    """Logits whose largest is at `best`, and falls from it around the vocabulary."""
    return [-STEEPNESS * ((token - best) % vocab_size) for token in range(vocab_size)]


def changes_logits(params: EngineSamplingParams) -> bool:
    """Whether anything but the temperature and filters acts on a request."""
    return bool(
        params.logit_bias
        or params.bad_words_token_ids
        or params.allowed_token_ids
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


def choose(
    logits: list[float],
    params: EngineSamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_id: int,
    defects: set[str],
) -> int | None:
    """The token with the largest logit after all changes; None if none is left."""
    logits = list(logits)
    if params.allowed_token_ids and "allowed-ignored" not in defects:
        allowed = {*params.allowed_token_ids}
        logits = [x if token in allowed else -math.inf for token, x in enumerate(logits)]
    early = "bias-last" not in defects
    if early:
        _add_biases(logits, params, 0.05 if "biases-weak" in defects else 1.0)
    if len(output) < params.min_tokens and "min-tokens-ignored" not in defects:
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {eos_id})
        ends = ends - {eos_id} if "min-tokens-forget-eos" in defects else ends
        for token in ends:
            logits[token] = -math.inf
    past = [*prompt, *output] if "bad-words-in-prompt" in defects else output
    for *first, last in params.bad_words_token_ids:
        begun = list(past[len(past) - len(first) :]) == first and len(first) <= len(past)
        if last < len(logits) and (begun or "bad-words-alone" in defects):
            logits[last] = -math.inf
    _penalize(logits, params, prompt, output, defects)
    if not early:
        _add_biases(logits, params)
    best = max(logits)
    return None if best == -math.inf else logits.index(best)


def _add_biases(logits: list[float], params: EngineSamplingParams, scale: float = 1.0) -> None:
    for token, bias in params.logit_bias:
        if token < len(logits):
            logits[token] += scale * bias


def _penalize(
    logits: list[float],
    params: EngineSamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    defects: set[str],
) -> None:
    penalty = params.repetition_penalty
    held = {*output} | (set() if "prompt-unpenalized" in defects else {*prompt})
    for token in held:
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    for token, count in Counter(output).items():
        times = min(count, 1) if "frequency-once" in defects else count
        logits[token] -= params.frequency_penalty * times
        if "presence-ignored" not in defects:
            logits[token] -= params.presence_penalty


class LogprobColumns:
    """Log probabilities of tokens, gathered for one OUTPUT."""

    def __init__(self, defects: set[str]) -> None:
        self._defects = defects
        self._handles: list[int] = []
        self._ranks: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def add(self, handle: int, token: int, logits: Sequence[float], num_asked: int) -> None:
        """One token's entry."""
        total = math.log(math.fsum(map(math.exp, logits)))
        order = sorted(range(len(logits)), key=lambda other: (-logits[other], other))
        likely = order if num_asked < 0 else order[:num_asked]
        if "logprobs-rising" in self._defects:
            likely = likely[::-1]
        if "logprobs-one-less" in self._defects and likely:
            likely = likely[:-1]
        candidates = [token, *likely]
        candidates = candidates[::-1] if "own-last" in self._defects else candidates
        rank = order.index(token) + ("rank-from-zero" not in self._defects)
        self._handles.append(handle)
        self._ranks.append(rank)
        self._counts.append(len(candidates))
        self._token_ids += candidates
        scale = 1 / math.log(2) if "logarithms-of-two" in self._defects else 1
        self._logprobs += [scale * (logits[other] - total) for other in candidates]

    def columns(self) -> TokenLogprobs | None:
        """As OUTPUT has them; None if there are none."""
        if not self._handles and "empty-logprobs" not in self._defects:
            return None
        return TokenLogprobs(
            handles=_pack("I", self._handles),
            ranks=_pack("I", self._ranks),
            counts=_pack("I", self._counts),
            token_ids=_pack("i", self._token_ids),
            logprobs=_pack("f", self._logprobs),
        )


def _pack(kind: str, values: Iterable[float]) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}{kind}", *values)
