"""Rules for engines: log probabilities of output and of prompt tokens.

What must hold for each entry is checked wherever OUTPUT is read (checked_logprobs.py): its number
of candidates, their order, ranks and sums, and that nobody gets what nobody asked for.
"""

from __future__ import annotations

from typing import Any

from nanocore.protocol.messages import Op
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_samples import NUM_SAMPLES, UNIFORM, session_of_1_5
from nanocore_conformance.engine_sessions import longest
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import PROMPT, Peer, submit_body
from nanocore_conformance.report import SkippedError, require

NUM_TOKENS = 8
MANY = 2**31 - 1
NEAR = 1e-3
"""How much log probabilities may differ where one prompt is computed in other pieces."""


def max_logprobs(peer: Peer) -> int:
    """How many an engine gives at most; all tokens if it has no limit."""
    limit = peer.welcome.limits.max_logprobs
    if limit is None:
        raise SkippedError("the engine tells no max_logprobs")
    return peer.welcome.model.vocab_size if limit < 0 else limit


@ENGINE_RULES.add("Limits")
def logprobs_have_a_limit(engine: EngineUnderTest) -> None:
    """max_logprobs is told and taken, one more is refused; -1 needs room for all tokens."""
    peer = session_of_1_5(engine)
    limit, size = peer.welcome.limits.max_logprobs, peer.welcome.model.vocab_size
    require(limit is not None and limit >= -1, "max_logprobs of at least -1", limit)
    for name in ("logprobs", "prompt_logprobs"):
        tried = {max_logprobs(peer): True, -1: max_logprobs(peer) >= size, MANY: limit == -1}
        tried |= {} if limit == -1 else {max_logprobs(peer) + 1: False}
        for num_asked, is_right in tried.items():
            asked: dict[str, Any] = {name: num_asked}
            peer.send(Op.SUBMIT, submit_body("asks", max_tokens=1, **asked))
            if is_right:
                peer.finish(peer.accepted("asks"))
            else:
                peer.refused("invalid_request", "asks", naming=name)
    peer.still_streams()


@ENGINE_RULES.add("Log probabilities")
def logprobs_are_of_every_token(engine: EngineUnderTest) -> None:
    """Each token has its entry, and the same tokens come whether they are asked for or not."""
    peer = session_of_1_5(engine)
    greedy: dict[str, Any] = {}
    for sampling in (greedy, {"temperature": UNIFORM, "seed": 7}):
        plain = peer.complete("plain", max_tokens=NUM_TOKENS, **sampling)
        for asked in sorted({0, 1, min(5, max_logprobs(peer)), max_logprobs(peer)}):
            told = peer.complete("told", max_tokens=NUM_TOKENS, logprobs=asked, **sampling)
            same = told.token_ids == plain.token_ids
            require(same, f"{plain.token_ids} with logprobs={asked}, too", told.token_ids)
            if not sampling:
                ranks = [entry.rank for entry in told.logprobs]
                require(set(ranks) == {1}, "rank 1 of every token at temperature 0", ranks)


@ENGINE_RULES.add("9. Sampling parameters")
def logprobs_are_of_the_models_own_logits(engine: EngineUnderTest) -> None:
    """Temperature, filters and biases change what is sampled, and not its log probability."""
    peer = session_of_1_5(engine)
    plain = peer.complete("plain", max_tokens=1, logprobs=min(2, max_logprobs(peer)))
    changes: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.25, "top_k": 1},
        "logit_bias": {"logit_bias": [[plain.token_ids[0], 100.0]]},
        "allowed_token_ids": {"allowed_token_ids": [plain.token_ids[0]]},
    }
    for name, sampling in changes.items():
        asked = min(2, max_logprobs(peer))
        changed = peer.complete("changed", max_tokens=1, logprobs=asked, **sampling)
        require(changed.token_ids == plain.token_ids, f"{plain.token_ids}", changed.token_ids)
        one, two = (stream.logprobs[0].candidates[0][1] for stream in (plain, changed))
        require(abs(one - two) <= NEAR, f"log probability {one}, whatever {name} is", two)


@ENGINE_RULES.add("Log probabilities")
def prompt_logprobs_are_of_every_token_but_the_first(engine: EngineUnderTest) -> None:
    """One entry for each, before the first token; the prefix cache is not read for them."""
    peer = session_of_1_5(engine)
    long = [i % 4 for i in range(min(3 * peer.welcome.model.block_size + 1, longest(peer)))]
    for prompt in ([1], [1, 2], long):
        plain = peer.complete("plain", prompt, max_tokens=2)
        first: Stream | None = None
        for asked in (0, min(2, max_logprobs(peer))):
            told = peer.complete("told", prompt, max_tokens=2, prompt_logprobs=asked)
            require(told.num_cached_tokens == 0, "0 cached tokens", told.num_cached_tokens)
            require(told.token_ids == plain.token_ids, f"{plain.token_ids}", told.token_ids)
            first = first or told
            for one, two in zip(first.prompt_logprobs, told.prompt_logprobs, strict=True):
                near = abs(one.candidates[0][1] - two.candidates[0][1]) <= NEAR
                require(near, f"the same prompt's {one.candidates[0]}", two.candidates[0])


@ENGINE_RULES.add("Log probabilities")
def logprobs_are_told_to_those_who_ask(engine: EngineUnderTest) -> None:
    """Requests that ask and that do not run side by side, in one session and in another."""
    peer, other = session_of_1_5(engine), engine.session()
    asked = min(2, max_logprobs(peer))
    body: dict[str, Any] = {"temperature": UNIFORM, "seed": 7, "max_tokens": NUM_TOKENS}
    peer.call("pause")  # so that they run in the same steps
    try:
        silent = [peer.submit("silent", **body), other.submit("other", **body)]
        told = peer.submit("told", n=NUM_SAMPLES, logprobs=asked, prompt_logprobs=asked, **body)
    finally:
        peer.call("resume")
    peer.finish(silent[0], *told.samples)
    other.finish(silent[1])
    for stream in silent:
        same = stream.token_ids == told.token_ids
        require(same, f"{told.token_ids}, of the same seed", stream.token_ids)
    numbers = [len(stream.logprobs) for stream in told.samples]
    require(numbers == [NUM_TOKENS] * NUM_SAMPLES, f"{NUM_TOKENS} for each sample", numbers)
    numbers = [len(stream.prompt_logprobs) for stream in told.samples]
    expected = [len(PROMPT) - 1] + [0] * (NUM_SAMPLES - 1)
    require(numbers == expected, "prompt_logprobs under the first handle", numbers)
