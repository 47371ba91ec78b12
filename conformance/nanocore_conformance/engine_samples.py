"""Rules for engines: several samples of one request, each with a handle, a seed and an end."""

from __future__ import annotations

import struct
from typing import Any

from nanocore.protocol.messages import Op
from nanocore_conformance.engine_requests import require_whole
from nanocore_conformance.engine_sessions import longest, runs_on
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer, submit_body
from nanocore_conformance.report import BrokenError, SkippedError, require

NUM_SAMPLES, NUM_TOKENS = 3, 16
UNIFORM = 1e300
"""A temperature at which noise alone chooses: samples of different seeds are then different."""
LAST_SEED = 2**53 - 1


def session_of_1_5(engine: EngineUnderTest) -> Peer:
    """A session with an engine that knows the fields of 1.5."""
    peer = engine.session()
    if peer.welcome.protocol < (1, 5):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.5")
    return peer


def abort_samples(peer: Peer, *handles: int) -> None:
    """ABORT of single samples."""
    column = struct.pack(f"<{len(handles)}I", *handles)
    peer.send(Op.ABORT, {"request_ids": [], "handles": column})


@ENGINE_RULES.add("ACCEPTED")
def samples_are_requests_with_seeds_of_their_own(engine: EngineUnderTest) -> None:
    """Sample i has handle + i, seed + i modulo 2^53, and the tokens of a request of that seed."""
    peer = session_of_1_5(engine)
    random: dict[str, Any] = {"temperature": UNIFORM, "max_tokens": NUM_TOKENS}
    for seed in (7, LAST_SEED):
        samples = peer.submit("several", n=NUM_SAMPLES, seed=seed, **random).samples
        peer.finish(*samples)
        for i, sample in enumerate(samples):
            require_whole(sample, NUM_TOKENS)
            alone = peer.complete("alone", seed=(seed + i) % (LAST_SEED + 1), **random)
            expected = f"sample {i} of seed {seed} to be {alone.token_ids}"
            require(sample.token_ids == alone.token_ids, expected, sample.token_ids)
    one = peer.complete("one", n=1, seed=7, **random)
    alone = peer.complete("alone", seed=7, **random)
    expected = f"n=1 to be {alone.token_ids}"
    require(one.token_ids == alone.token_ids, expected, one.token_ids)
    peer.still_streams()


@ENGINE_RULES.add("ABORT")
def samples_are_aborted_one_by_one(engine: EngineUnderTest) -> None:
    """ABORT of a handle ends that sample, the first one too; the others lose nothing."""
    peer = session_of_1_5(engine)
    random: dict[str, Any] = {"temperature": UNIFORM, "max_tokens": NUM_TOKENS, "seed": 7}
    for aborted in (0, NUM_SAMPLES - 1):
        peer.call("pause")  # so that none can end by itself
        try:
            samples = peer.submit("several", n=NUM_SAMPLES, **random).samples
            abort_samples(peer, samples[aborted].handle, samples[aborted].handle)
        finally:
            peer.call("resume")
        peer.finish(*samples)
        for i, sample in enumerate(samples):
            if i == aborted:
                reason = sample.finish_reason
                require(reason == "abort", f"'abort' of sample {i}", reason)
                continue
            require_whole(sample, NUM_TOKENS)
            alone = peer.complete("alone", **random | {"seed": 7 + i}).token_ids
            require(sample.token_ids == alone, f"sample {i} to be {alone}", sample.token_ids)
    abort_samples(peer, samples[0].handle)
    peer.quiet()
    peer.still_streams()


@ENGINE_RULES.add("10. Ordering and delivery")
def id_is_free_when_all_samples_have_ended(engine: EngineUnderTest) -> None:
    """While one sample runs the id is in use; ABORT by the id ends all that have not ended."""
    peer = session_of_1_5(engine)
    samples = peer.submit("several", n=NUM_SAMPLES, max_tokens=longest(peer)).samples
    abort_samples(peer, samples[1].handle)
    peer.finish(samples[1])
    peer.send(Op.SUBMIT, submit_body("several", max_tokens=5))
    try:
        peer.refused("duplicate_request_id", "several")
    except BrokenError:
        if all(sample.finish_reason == "length" for sample in (samples[0], samples[2])):
            raise SkippedError("the longest request ends before another can be sent") from None
        raise
    peer.send(Op.ABORT, {"request_ids": ["several"]})
    peer.finish(*samples)
    peer.call("pause")  # so that none can end by itself
    try:
        samples = peer.submit("several", n=NUM_SAMPLES).samples
        peer.send(Op.ABORT, {"request_ids": ["several"]})
    finally:
        peer.call("resume")
    peer.finish(*samples)
    ends = [sample.finish_reason for sample in samples]
    require(set(ends) == {"abort"}, "'abort' of all samples", ends)
    require_whole(peer.complete("several", max_tokens=3), 3)


@ENGINE_RULES.add("ABORT")
def foreign_handles_are_not_aborted(engine: EngineUnderTest) -> None:
    """ABORT of another session's handle, or of nobody's, ends nothing and gets no answer."""
    peer, stranger = session_of_1_5(engine), engine.session()
    stream = peer.submit("mine", max_tokens=longest(peer))
    abort_samples(stranger, stream.handle, 0, 2**32 - 1)
    stranger.quiet()
    abort_samples(peer, stream.handle + 1)
    runs_on(peer, stream)
