"""Rules for engines: requests that bring the output of an earlier run, and those with a time limit.

A run is played by taking what a whole request gave and cutting it: the engine that goes on with it
is the one that gave it, so its tokens must be the same whatever it says of its numerics.
"""

from __future__ import annotations

from typing import Any

from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import Draining, Error, Op
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_requests import require_whole
from nanocore_conformance.engine_sessions import longest
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import PROMPT, Body, Peer, submit_body
from nanocore_conformance.report import SkippedError, require

SECTION = "Going on after the engine is gone"
NUM_TOKENS = 12
CUTS = (1, 5, NUM_TOKENS - 1)
UNIFORM = 1e300
"""A temperature at which noise alone chooses."""
RUNS: tuple[Body, ...] = (
    {},
    {"temperature": UNIFORM, "seed": 2**53 - 1},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
)
"""Parameters of requests that are cut."""
SOON_S = 0.02


def session_of_1_9(engine: EngineUnderTest) -> Peer:
    """A session with an engine that knows the fields of 1.9."""
    peer = engine.session()
    if peer.welcome.protocol < (1, 9):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.9")
    return peer


def resume(peer: Peer, tokens: list[int], **sampling: object) -> Stream:
    """Read what follows these tokens of a request, to its end."""
    body = submit_body("resumed", None, **sampling) | {"output_token_ids": pack_int32(tokens)}
    peer.send(Op.SUBMIT, body)
    stream = peer.accepted("resumed")
    peer.finish(stream)
    return stream


@ENGINE_RULES.add(SECTION)
def resumed_requests_go_on_as_they_would_have(engine: EngineUnderTest) -> None:
    """Behind its first tokens a request gives the others, and all that looks at output saw them."""
    peer = session_of_1_9(engine)
    for parameters in RUNS:
        run: dict[str, Any] = {"max_tokens": NUM_TOKENS, **parameters}
        whole = peer.complete("whole", **run)
        require_whole(whole, NUM_TOKENS)
        for num_tokens in CUTS:
            rest = resume(peer, whole.token_ids[:num_tokens], **run)
            expected = f"{whole.token_ids[num_tokens:]} behind {num_tokens} tokens, of {run}"
            require(rest.token_ids == whole.token_ids[num_tokens:], expected, rest.token_ids)
            require(rest.finish_reason == "length", "'length' at max_tokens", rest.finish_reason)
    peer.still_streams()


@ENGINE_RULES.add(SECTION)
def stop_rules_count_resumed_tokens(engine: EngineUnderTest) -> None:
    """min_tokens counts what is brought: a stop token that it kept away comes when it may."""
    peer = session_of_1_9(engine)
    stop = peer.complete("whole", max_tokens=1).token_ids[0]
    biased: dict[str, Any] = {
        "max_tokens": NUM_TOKENS, "min_tokens": 4, "stop_token_ids": [stop],
        "logit_bias": [[stop, 100.0]],
    }  # fmt: skip
    whole = peer.complete("stopped", **biased)
    for num_tokens in range(1, len(whole.token_ids)):
        rest = resume(peer, whole.token_ids[:num_tokens], **biased)
        got = (rest.token_ids, rest.finish_reason, rest.stop_reason)
        expected = (whole.token_ids[num_tokens:], whole.finish_reason, whole.stop_reason)
        require(got == expected, f"{expected} behind {num_tokens} tokens", got)


@ENGINE_RULES.add(SECTION)
def outputs_that_have_ended_end_at_once(engine: EngineUnderTest) -> None:
    """A request whose tokens have ended it is accepted, and ends without another one."""
    peer = session_of_1_9(engine)
    tokens = peer.complete("whole", max_tokens=4).token_ids
    last = tokens[-1]
    upto = tokens[: tokens.index(last) + 1]
    eos = peer.welcome.model.eos_token_ids[:1]
    ends: list[tuple[list[int], Body, tuple[str, int | None]]] = [
        (tokens, {"max_tokens": 4}, ("length", None)),
        (upto, {"max_tokens": 9, "stop_token_ids": [last]}, ("stop", last)),
    ]
    if eos and eos[0] not in tokens:
        ends.append((tokens + eos, {"max_tokens": 9, "ignore_eos": False}, ("stop", None)))
    for brought, parameters, end in ends:
        stream = resume(peer, brought, **parameters)
        got = (stream.token_ids, stream.finish_reason, stream.stop_reason)
        require(got == ([], *end), f"no token and {end} behind {brought}, of {parameters}", got)
    peer.still_streams()


@ENGINE_RULES.add("SUBMIT")
def outputs_that_cannot_be_are_refused(engine: EngineUnderTest) -> None:
    """Several samples, ids of no token, more than max_tokens, and tokens behind an end."""
    peer = session_of_1_9(engine)
    model = peer.welcome.model
    cases: dict[str, tuple[list[int], Body]] = {
        "n": ([1], {"n": 2}),
        "vocabulary": ([model.vocab_size], {}),
        "max_tokens": ([1, 2, 3], {"max_tokens": 2}),
        "end": ([1, 3, 2], {"stop_token_ids": [3]}),
    }
    for name, (tokens, sampling) in cases.items():
        brought = {"output_token_ids": pack_int32(tokens)}
        peer.send(Op.SUBMIT, submit_body(name, None, **sampling) | brought)
        peer.refused("invalid_request", name, naming="output_token_ids")
    num_left = model.max_model_len - len(PROMPT)
    if num_left < 10_000:
        brought = {"output_token_ids": pack_int32([1] * (num_left + 1))}
        peer.send(Op.SUBMIT, submit_body("long", max_tokens=None) | brought)
        peer.refused("context_length_exceeded", "long")
    peer.still_streams()


@ENGINE_RULES.add("SUBMIT")
def timeouts_end_requests(engine: EngineUnderTest) -> None:
    """timeout_s ends a request that takes longer with "timeout", also in a pause, and no other."""
    peer = session_of_1_9(engine)
    alone = peer.complete("alone", max_tokens=8).token_ids
    require(peer.call("pause").ok, "a pause", "ok false")  # so that it cannot end before
    peer.send(Op.SUBMIT, submit_body("hasty", max_tokens=8) | {"timeout_s": SOON_S})
    hasty = peer.accepted("hasty")
    peer.finish(hasty)
    require(hasty.finish_reason == "timeout", "finish_reason 'timeout'", hasty.finish_reason)
    require(peer.call("resume").ok, "the pause to end", "ok false")
    peer.send(Op.SUBMIT, submit_body("patient", max_tokens=8) | {"timeout_s": 1e6})
    patient = peer.accepted("patient")
    peer.finish(patient)
    require(patient.token_ids == alone, f"{alone} with a long timeout_s", patient.token_ids)
    peer.still_streams()


@ENGINE_RULES.add("13. Shutdown and failure", flag="drain")
def drain_finishes_what_runs(engine: EngineUnderTest) -> None:
    """DRAINING is told, SUBMITs are refused, and what ran ends before BYE. It ends the engine."""
    peer, other = session_of_1_9(engine), engine.session()
    stream = peer.submit("runs", max_tokens=longest(peer))
    require(other.call("drain").ok, "drain to be done", "ok false")
    for one in (peer, other):
        one.expect(Draining)
    other.send(Op.SUBMIT, submit_body("late"))
    refused: Error = other.refused("draining", "late")
    told = f"retry_after_s {refused.retry_after_s}"
    require(bool(refused.retry_after_s), "ERROR draining with retry_after_s", told)
    peer.finish(stream)
    require(stream.finish_reason == "length", "'length', as ever", stream.finish_reason)
    for one in (peer, other):
        message = one.receive("BYE")
        require(message.op is Op.BYE, "BYE", message)
