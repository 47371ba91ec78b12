"""Rules for engines: a request's life from SUBMIT to its one end."""

from __future__ import annotations

import itertools

from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import Op, Pong
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_sessions import longest, runs_on
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import PROMPT, Peer, submit_body
from nanocore_conformance.report import BrokenError, SkippedError, require

NUM_INTERLEAVED = 32
NUM_UNREAD_PINGS = 20_000
"""More answers than queues and buffers on both sides hold: what follows waits in the engine."""


def require_whole(stream: Stream, num_tokens: int) -> None:
    """Raise unless a request ended by its length."""
    got = f"{len(stream.token_ids)} tokens and finish_reason {stream.finish_reason!r}"
    ok = stream.finish_reason == "length" and len(stream.token_ids) == num_tokens
    require(ok, f"{num_tokens} tokens and finish_reason 'length'", got)


@ENGINE_RULES.add("10. Ordering and delivery")
def request_runs_from_accepted_to_one_end(engine: EngineUnderTest) -> None:
    """ACCEPTED, then tokens below vocab_size, max_tokens of them, then one end, then nothing."""
    peer = engine.session()
    for num_tokens in (1, 2, 7, 33):
        require_whole(peer.complete(f"n{num_tokens}", max_tokens=num_tokens), num_tokens)
        peer.quiet()
    peer.still_streams()


@ENGINE_RULES.add("ACCEPTED")
def handles_are_never_reused(engine: EngineUnderTest) -> None:
    """No handle is given twice, within a session or across them."""
    for peer in (engine.session(), engine.session()):
        for i in range(5):
            peer.complete(f"r{i}", max_tokens=1)
        peer.complete("r0", max_tokens=1)


@ENGINE_RULES.add("Event")
def cached_tokens_are_told_with_the_first_token(engine: EngineUnderTest) -> None:
    """num_cached_tokens comes with the first token, and is part of the prompt."""
    peer = engine.session()
    num_prompt = min(4 * peer.welcome.model.block_size, longest(peer) - 1)
    prompt = [i % 4 for i in range(num_prompt)]
    for i in range(2):
        stream = peer.complete(f"r{i}", prompt, max_tokens=3)
        cached = stream.num_cached_tokens
        require(cached is not None, "num_cached_tokens with the first token", stream)
        within = 0 <= (cached or 0) <= num_prompt
        require(within, f"num_cached_tokens of 0 to {num_prompt}", cached)
        if "prefix_caching" not in peer.welcome.capabilities:
            require(cached == 0, "0 cached tokens without the capability", cached)


@ENGINE_RULES.add("9. Sampling parameters")
def greedy_requests_repeat(engine: EngineUnderTest) -> None:
    """The same prompt at temperature 0 gives the same tokens."""
    peer = engine.session()
    for prompt in (PROMPT, [0], [3, 3, 2, 1, 0]):
        one = peer.complete("one", prompt, max_tokens=16)
        two = peer.complete("two", prompt, max_tokens=16, skip_reading_prefix_cache=True)
        require(one.token_ids == two.token_ids, f"{one.token_ids} again", two.token_ids)


@ENGINE_RULES.add("9. Sampling parameters")
def seeds_repeat(engine: EngineUnderTest) -> None:
    """ACCEPTED tells the seed; the same seed gives the same tokens, also one that was drawn."""
    peer = engine.session()
    given = peer.complete("given", temperature=1.0, seed=7, max_tokens=16)
    require(given.seed == 7, "seed 7 in ACCEPTED", given.seed)
    drawn = peer.complete("drawn", temperature=1.0, max_tokens=16)
    for first in (given, drawn):
        again = peer.complete("again", temperature=1.0, seed=first.seed, max_tokens=16)
        expected = f"{first.token_ids} again, with seed {first.seed}"
        require(again.token_ids == first.token_ids, expected, again.token_ids)


@ENGINE_RULES.add("ABORT")
def abort_ends_a_request(engine: EngineUnderTest) -> None:
    """ABORT ends a request with "abort", its repetition and its crossing the end do nothing."""
    peer = engine.session()
    stream = peer.submit("long", max_tokens=longest(peer))
    for _ in range(3):
        peer.send(Op.ABORT, {"request_ids": ["long", "long"]})
    peer.finish(stream)
    require(stream.finish_reason == "abort", "finish_reason 'abort'", stream.finish_reason)
    peer.send(Op.ABORT, {"request_ids": ["long"]})
    peer.quiet()
    peer.still_streams()


@ENGINE_RULES.add("ABORT")
def abort_of_the_unknown_is_ignored(engine: EngineUnderTest) -> None:
    """Ids of nobody among others harm neither the session nor what else is aborted."""
    peer = engine.session()
    stay = peer.submit("stay", max_tokens=32)
    leave = peer.submit("leave", max_tokens=longest(peer))
    peer.send(Op.ABORT, {"request_ids": ["nobody", "leave", ""]})
    peer.finish(stay, leave)
    require(leave.finish_reason == "abort", "finish_reason 'abort'", leave.finish_reason)
    require_whole(stay, 32)


@ENGINE_RULES.add("SUBMIT")
def duplicate_id_leaves_the_first_untouched(engine: EngineUnderTest) -> None:
    """An id in use is refused, its request runs on, and after its end the id is free."""
    peer = engine.session()
    alone = peer.complete("alone", max_tokens=32).token_ids
    first = peer.submit("a", max_tokens=longest(peer))
    peer.send(Op.SUBMIT, submit_body("a", [3, 2, 1], max_tokens=5))
    try:
        peer.refused("duplicate_request_id", "a")
    except BrokenError:
        if first.finish_reason == "length":
            raise SkippedError("the longest request ends before another can be sent") from None
        raise
    runs_on(peer, first)
    tokens = first.token_ids[:32]
    require(tokens == alone, f"the first's tokens, {alone}", tokens)
    require_whole(peer.complete("a", max_tokens=3), 3)


@ENGINE_RULES.add("11. Flow control and limits")
def too_long_requests_are_refused(engine: EngineUnderTest) -> None:
    """What does not fit max_model_len is context_length_exceeded; what just fits is taken.

    From 1.12 on one token may follow a prompt of all of max_model_len.
    """
    peer = engine.session()
    model = peer.welcome.model
    length = model.max_model_len
    peer.send(Op.SUBMIT, submit_body("more", max_tokens=length - len(PROMPT) + 1))
    peer.refused("context_length_exceeded", "more")
    prompt = pack_int32([1] * length)
    body = {"request_id": "prompt", "prompt_token_ids": prompt, "sampling": {}}
    if len(prompt) < peer.welcome.limits.max_frame_bytes // 2:
        peer.send(Op.SUBMIT, body)
        peer.refused("context_length_exceeded", "prompt")
        if peer.welcome.protocol >= (1, 12) and length <= model.num_blocks * model.block_size:
            peer.submit("whole", [1] * length, max_tokens=1)
            peer.send(Op.ABORT, {"request_ids": ["whole"]})
    if length <= model.num_blocks * model.block_size:
        peer.submit("fits", max_tokens=length - len(PROMPT))
        peer.send(Op.ABORT, {"request_ids": ["fits"]})
    peer.still_streams()


@ENGINE_RULES.add("10. Ordering and delivery")
def many_requests_interleave(engine: EngineUnderTest) -> None:
    """Many requests at once, of different lengths, each get their own tokens and end."""
    peer = engine.session()
    most = peer.welcome.limits.max_num_queued_reqs or NUM_INTERLEAVED
    lengths = {f"r{i}": 1 + 3 * i % 17 for i in range(min(most, NUM_INTERLEAVED))}
    for request_id, num_tokens in lengths.items():
        prompt = [i % 4 for i in range(1 + num_tokens)]
        peer.send(Op.SUBMIT, submit_body(request_id, prompt, max_tokens=num_tokens))
    streams = [peer.accepted(request_id) for request_id in lengths]
    peer.finish(*streams)
    for stream in streams:
        require_whole(stream, lengths[stream.request_id])


@ENGINE_RULES.add("11. Flow control and limits")
def late_reader_gets_everything(engine: EngineUnderTest) -> None:
    """A client that did not read while its request ran gets all of it, merged and in order."""
    peer, watcher = engine.session(), engine.session()
    num_tokens = min(256, longest(peer))
    alone = peer.complete("alone", max_tokens=num_tokens).token_ids
    num_sampled = engine.until_idle(watcher).generation_tokens + num_tokens
    for nonce in range(NUM_UNREAD_PINGS):
        peer.send(Op.PING, {"nonce": nonce})
    peer.send(Op.SUBMIT, submit_body("late", max_tokens=num_tokens))
    what = f"the request of a client that does not read to run: {num_sampled} tokens"
    engine.until(watcher, what, lambda stats: stats.generation_tokens >= num_sampled)
    _read_pongs(peer, NUM_UNREAD_PINGS)
    late = peer.accepted("late")
    peer.finish(late)
    require(late.token_ids == alone, f"the {num_tokens} tokens it gave before", late.token_ids)
    peer.still_streams()


def _read_pongs(peer: Peer, num_pongs: int) -> None:
    for nonce in range(num_pongs):
        pong = peer.expect(Pong, f"with nonce {nonce}")
        require(pong.nonce == nonce, f"PONG with nonce {nonce}, in order", pong)


@ENGINE_RULES.add("SUBMIT")
def prompts_end_at_the_vocabulary(engine: EngineUnderTest) -> None:
    """The last id of the vocabulary is taken, the next is refused, in prompts and stop tokens."""
    peer = engine.session()
    size = peer.welcome.model.vocab_size
    peer.complete("last", [size - 1], max_tokens=1, stop_token_ids=[size - 1])
    for request_id, body in {
        "prompt": submit_body("prompt", [size]),
        "stop": submit_body("stop", stop_token_ids=[size]),
    }.items():
        peer.send(Op.SUBMIT, body)
        peer.refused("invalid_request", request_id, naming=str(size))
    peer.still_streams()


@ENGINE_RULES.add("Limits")
def queue_limits_are_told_in_time(engine: EngineUnderTest) -> None:
    """With a queue's limit, what is above it is overloaded with retry_after_s, and not queued."""
    peer = engine.session()
    limit = peer.welcome.limits.max_num_queued_reqs
    if limit is None or limit > 10_000:
        raise SkippedError(f"the engine's max_num_queued_reqs is {limit}")
    peer.call("pause")
    try:
        for i in itertools.count():
            peer.send(Op.SUBMIT, submit_body(f"q{i}", max_tokens=1))
            message = peer.receive("ACCEPTED or ERROR overloaded")
            if message.op is Op.ERROR:
                break
            require(message.op is Op.ACCEPTED, "ACCEPTED or ERROR overloaded", message)
            most = limit + peer.welcome.limits.max_num_seqs + 1
            require(i < most, f"overloaded after at most {most} requests", "ACCEPTED")
    finally:
        peer.call("resume")
    code, retry = getattr(message, "code", None), getattr(message, "retry_after_s", None)
    got = f"ERROR {code}, retry_after_s {retry}"
    require(code == "overloaded" and bool(retry), "ERROR overloaded with retry_after_s", got)
