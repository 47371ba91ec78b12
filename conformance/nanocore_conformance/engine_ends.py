"""Rules for engines: what ends a request, and what is said of its end."""

from __future__ import annotations

from typing import Any

from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_resumed import resume
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer
from nanocore_conformance.report import SkippedError, require

NUM_SEEDS, NUM_AT_ONCE = 64, 4
NUM_TOKENS = 64
UNIFORM = 1e300
"""A temperature at which every token is as likely as every other."""
MAX_LENGTH = 8192
"""A prompt nearly as long as the model's length is tried up to here: it takes time."""


@ENGINE_RULES.add("9. Sampling parameters")
def stop_token_ends_the_request(engine: EngineUnderTest) -> None:
    """A stop token is the last one delivered, and stop_reason names it."""
    peer = engine.session()
    whole = peer.complete("whole", max_tokens=16).token_ids
    stop = whole[-1]
    upto = whole[: whole.index(stop) + 1]
    stream = peer.complete("stopped", max_tokens=16, stop_token_ids=[stop])
    _require_end(stream, upto, stop)


@ENGINE_RULES.add("Event")
def eos_comes_before_stop_tokens(engine: EngineUnderTest) -> None:
    """EOS ends without stop_reason, also if it is a stop token; with ignore_eos it is only that."""
    peer = engine.session()
    eos = peer.welcome.model.eos_token_ids
    seed, upto = _find_eos(peer, eos)
    same: dict[str, Any] = {"seed": seed, "temperature": UNIFORM, "max_tokens": NUM_TOKENS}
    _require_end(peer.complete("eos", ignore_eos=False, **same), upto, None)
    both: dict[str, Any] = {"stop_token_ids": eos, **same}
    _require_end(peer.complete("both", ignore_eos=False, **both), upto, None)
    _require_end(peer.complete("stop", ignore_eos=True, **both), upto, upto[-1])


@ENGINE_RULES.add("Repetition detection")
def repetition_ends_the_request(engine: EngineUnderTest) -> None:
    """The token that completes the last repetition ends the request, also if it was resumed."""
    peer = engine.session()
    if peer.welcome.protocol < (1, 14):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, before 1.14")
    token = peer.complete("first", max_tokens=1).token_ids[0]
    detection = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    for name, num_tokens, more in (
        ("at-once", 6, {}),
        ("after-min-tokens", 8, {"min_tokens": 8}),
        ("at-length", 6, {"max_tokens": 6}),
    ):
        same = {"logit_bias": [[token, 100.0]], "repetition_detection": detection} | more
        parameters: dict[str, Any] = {"max_tokens": NUM_TOKENS, **same}
        stream = peer.complete(name, **parameters)
        _require_repetition(stream, [token] * num_tokens)
        for num_done in (1, num_tokens - 1, num_tokens):
            rest = resume(peer, [token] * num_done, **parameters)
            _require_repetition(rest, [token] * (num_tokens - num_done))


@ENGINE_RULES.add("Event")
def models_length_ends_a_request(engine: EngineUnderTest) -> None:
    """Without max_tokens a request ends with "length" when prompt and output fill the model's."""
    peer = engine.session()
    model = peer.welcome.model
    length = model.max_model_len
    if length > min(MAX_LENGTH, model.num_blocks * model.block_size):
        raise SkippedError(f"max_model_len={length} is more than this rule, or the cache, allows")
    for num_left in (1, 3):
        if num_left < length:
            prompt = [i % 4 for i in range(length - num_left)]
            stream = peer.complete(f"left-{num_left}", prompt, max_tokens=None)
            got = (len(stream.token_ids), stream.finish_reason)
            require(got == (num_left, "length"), f"{num_left} tokens, then 'length'", got)


def _find_eos(peer: Peer, eos: list[int]) -> tuple[int, list[int]]:
    """A seed with which EOS comes up by chance, and the tokens up to it."""
    num_tokens = min(NUM_TOKENS, peer.welcome.model.max_model_len - 3)
    random = {"temperature": UNIFORM, "max_tokens": num_tokens}
    for first in range(0, NUM_SEEDS if eos else 0, NUM_AT_ONCE):
        streams = [
            peer.submit(f"look-{seed}", None, seed=seed, **random)
            for seed in range(first, first + NUM_AT_ONCE)
        ]
        peer.finish(*streams)
        for stream in streams:
            for i, token in enumerate(stream.token_ids):
                if token in eos:
                    return stream.seed, stream.token_ids[: i + 1]
    raise SkippedError(f"none of eos_token_ids={eos} came up in {NUM_SEEDS} random requests")


def _require_repetition(stream: Stream, tokens: list[int]) -> None:
    got = (stream.token_ids, stream.finish_reason, stream.stop_reason, stream.stop_cause)
    expected = (tokens, "stop", None, "repetition")
    require(
        got == expected, "tokens, finish_reason, stop_reason and stop_cause " + str(expected), got
    )


def _require_end(stream: Stream, tokens: list[int], stop_reason: int | None) -> None:
    got = (stream.token_ids, stream.finish_reason, stream.stop_reason)
    expected = f"{tokens}, 'stop' and stop_reason {stop_reason}"
    require(got == (tokens, "stop", stop_reason), expected, got)
