"""Scenarios for clients that go well: the output is the same however the stream is cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import msgspec

from nanocore.protocol.messages import Op, Pong
from nanocore_conformance.client_under_test import CLIENT_SCENARIOS, ClientUnderTest
from nanocore_conformance.played_engine import (
    HANDLE,
    WELCOME,
    Body,
    end,
    logprobs_body,
    output_body,
)
from nanocore_conformance.report import require

TOKENS = [11, 0, 2**31 - 2, 13]
FIRST: Body = {"handle": HANDLE, "num_cached_tokens": 0}
NEW: Body = {"new_in_9": {"deep": [1, None, {"x": b"y"}]}}
LIMITS_SINCE_1_0 = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_file_chunk_bytes",
    "max_num_clients",
    "max_logprobs",
)
NUM_SMALL = 3000
NUM_HUGE = 300_000


@CLIENT_SCENARIOS.add("1. In one minute")
def tokens_are_printed_as_they_arrive(tested: ClientUnderTest) -> None:
    """HELLO, SUBMIT, a token at a time, its end, BYE: each token on a line when it comes."""
    with tested.client(len(TOKENS)) as client:
        client.open(len(TOKENS))
        for i, token in enumerate(TOKENS):
            last = i == len(TOKENS) - 1
            client.output([token], *([FIRST] if i == 0 else [end()] if last else []))
            client.prints(str(token))
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("OUTPUT")
def merged_tokens_are_told_apart_by_counts(tested: ClientUnderTest) -> None:
    """Several tokens of a request in one message, among those of others."""
    with tested.client(6) as client:
        client.open(6)
        client.send(Op.OUTPUT, output_body({3: [90, 91], HANDLE: [1, 2, 3], 9: [92]}, FIRST))
        client.send(Op.OUTPUT, output_body({HANDLE: [4, 5], 9: [93]}))
        client.send(Op.OUTPUT, output_body({9: [94, 95], HANDLE: [6]}, end()))
        client.leaves([1, 2, 3, 4, 5, 6], "length")


@CLIENT_SCENARIOS.add("Event")
def tokens_and_end_may_be_one_message(tested: ClientUnderTest) -> None:
    """An event refers to the state after the tokens of its message: first, last and end at once."""
    with tested.client() as client:
        client.open(4)
        client.output(TOKENS, FIRST, end())
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("Event")
def start_and_end_may_be_one_event(tested: ClientUnderTest) -> None:
    """All that is said of a request in one message may stand in one event, or in two."""
    nils = {"num_cached_tokens": None, "finish_reason": None, "stop_reason": None}
    for events in (
        [FIRST | end()],
        [nils | FIRST, {"handle": 9, "finish_reason": "stop"}, nils | end()],
    ):
        with tested.client() as client:
            client.open(4)
            client.output(TOKENS, *events)
            client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("4. Framing")
def count_of_zero_is_no_tokens(tested: ClientUnderTest) -> None:
    """A handle with a count of 0 got nothing: what follows belongs to the next handle."""
    with tested.client() as client:
        client.open(4)
        client.send(Op.OUTPUT, output_body({3: [], HANDLE: TOKENS[:2], 9: []}, FIRST))
        client.send(Op.OUTPUT, output_body({HANDLE: []}))
        client.send(Op.OUTPUT, output_body({3: [90, 91], HANDLE: []}))
        client.send(Op.OUTPUT, output_body({HANDLE: TOKENS[2:]}))
        client.send(Op.OUTPUT, output_body({HANDLE: []}, end()))
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("Event")
def every_finish_reason_is_told(tested: ClientUnderTest) -> None:
    """An abort or an error of one request, with its message, is an end, and no failure."""
    for reason, message in (("abort", "SIGTERM"), ("error", "no finite logit"), ("abort", None)):
        with tested.client() as client:
            client.open(4)
            client.output(TOKENS[:2], FIRST)
            client.output([], end(reason, **({"message": message} if message else {})))
            client.leaves(TOKENS[:2], reason)


@CLIENT_SCENARIOS.add("Event")
def end_may_come_without_tokens(tested: ClientUnderTest) -> None:
    """The end in a message of its own, after messages with nothing in them."""
    with tested.client() as client:
        client.open(4)
        client.output(TOKENS[:2], FIRST)
        client.send(Op.OUTPUT, {})
        client.send(Op.OUTPUT, {"handles": b"", "tokens": b"", "counts": b"", "events": []})
        client.output([], {"handle": HANDLE})
        client.output([], end())
        client.leaves(TOKENS[:2], "length")


@CLIENT_SCENARIOS.add("Event")
def stop_ends_before_max_tokens(tested: ClientUnderTest) -> None:
    """finish_reason "stop", with the stop token as the last one."""
    with tested.client(100) as client:
        client.open(100)
        client.output(TOKENS[:1], FIRST)
        client.output(TOKENS[1:2], end("stop", stop_reason=TOKENS[1]))
        client.leaves(TOKENS[:2], "stop")


@CLIENT_SCENARIOS.add("4. Framing")
def unknown_fields_are_ignored(tested: ClientUnderTest) -> None:
    """Fields and capabilities of later versions, in every message and inside their maps."""
    welcome = copy.deepcopy(WELCOME) | NEW
    for part in (welcome["model"], welcome["limits"], welcome["model"]["default_sampling"]):
        part |= NEW
    welcome["capabilities"] = ["prefix_caching", "telepathy"]
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, welcome)
        request_id = client.submit(4).request_id
        client.send(Op.PING, {"nonce": 5} | NEW)
        accepted = {"request_id": request_id, "handle": HANDLE, "seed": 1}
        client.send(Op.ACCEPTED, NEW | accepted)
        client.send(Op.OUTPUT, NEW | output_body({HANDLE: TOKENS[:1]}, FIRST | NEW))
        client.send(Op.OUTPUT, output_body({HANDLE: TOKENS[1:]}, NEW | end()))
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("6. Versions and capabilities")
def older_engine_is_understood(tested: ClientUnderTest) -> None:
    """A WELCOME of 1.0, with the fields of 1.0 alone."""
    welcome = copy.deepcopy(WELCOME) | {"protocol": [1, 0]}
    del welcome["capabilities"]
    for name in ("default_sampling", "files"):
        del welcome["model"][name]
    for name in LIMITS_SINCE_1_0:
        del welcome["limits"][name]
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, welcome)
        request_id = client.submit(4).request_id
        client.send(Op.ACCEPTED, {"request_id": request_id, "handle": HANDLE, "seed": 1})
        client.output(TOKENS, FIRST, end())
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("OUTPUT")
def foreign_handles_are_ignored(tested: ClientUnderTest) -> None:
    """Tokens and ends of handles that the client never had, or whose request has ended."""
    with tested.client() as client:
        client.open(4)
        beside = output_body({1: [90], HANDLE: TOKENS[:1], 2**32 - 1: [91]}, FIRST)
        stranger = {"handle": 1, "finish_reason": "length"}
        with client.held():
            client.send(Op.OUTPUT, beside)
            client.send(Op.OUTPUT, output_body({HANDLE: TOKENS[1:3]}, stranger))
            client.send(Op.OUTPUT, output_body({}, {"handle": 0, "finish_reason": "error"}))
            client.output(TOKENS[3:], end())
            client.output([92, 93])
            client.output([94], end("stop"))
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("Log probabilities")
def log_probabilities_nobody_asked_for_are_ignored(tested: ClientUnderTest) -> None:
    """Send log probabilities early, of unknown handles, and with new columns."""
    told = logprobs_body(HANDLE, TOKENS[:2]) | NEW
    with tested.client() as client:
        client.open(4)
        client.send(Op.OUTPUT, {"prompt_logprobs": logprobs_body(HANDLE, [2, 3])})
        client.send(Op.OUTPUT, {"logprobs": {}, "prompt_logprobs": {}})
        both = {"logprobs": told, "prompt_logprobs": logprobs_body(3, [7])}
        client.send(Op.OUTPUT, output_body({HANDLE: TOKENS[:2]}, FIRST) | both)
        strangers = {"logprobs": logprobs_body(3, [90])}
        client.send(Op.OUTPUT, output_body({3: [90]}) | strangers)
        client.send(Op.OUTPUT, output_body({HANDLE: TOKENS[2:]}, end()) | {"logprobs": None})
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("ACCEPTED")
def samples_of_others_are_ignored(tested: ClientUnderTest) -> None:
    """Tokens and ends of the handles behind the client's own are another request's samples."""
    with tested.client() as client:
        client.open(4)
        with client.held():
            for i, token in enumerate(TOKENS):
                neighbour = {"handle": HANDLE + 1 + i, "finish_reason": "abort"}
                last = [end()] if i == len(TOKENS) - 1 else []
                tokens: Mapping[int, list[int]] = {HANDLE + 1 + i: [80 + i], HANDLE: [token]}
                client.send(Op.OUTPUT, output_body(tokens, neighbour, *last))
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("10. Ordering and delivery")
def answers_are_matched_by_request_id(tested: ClientUnderTest) -> None:
    """Answers need not come in the order of SUBMITs: those of other requests are others'."""
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, WELCOME)
        request_id = client.submit(4).request_id
        refused = {"code": "invalid_request", "message": "of another", "request_id": "another"}
        others = output_body({3: [90, 91]}, {"handle": 3, "finish_reason": "stop"})
        with client.held():
            client.send(Op.ACCEPTED, {"request_id": f"{request_id}'", "handle": 3, "seed": 1})
            client.send(Op.ERROR, refused)
            client.send(Op.OUTPUT, others)
            client.send(Op.ACCEPTED, {"request_id": request_id, "handle": HANDLE, "seed": 0})
            client.output(TOKENS, FIRST, end())
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("ACCEPTED")
def handles_may_be_the_smallest_and_the_largest(tested: ClientUnderTest) -> None:
    """Handles are uint32: 0, and 2^32 - 1."""
    for handle in (0, 2**32 - 1):
        with tested.client() as client:
            client.open(4, handle)
            done = {"handle": handle, "finish_reason": "length"}
            client.send(Op.OUTPUT, output_body({handle: TOKENS}, done))
            client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("PING")
def ping_is_answered_at_any_time(tested: ClientUnderTest) -> None:
    """A PONG with the PING's nonce: before ACCEPTED, in mid-stream, without nonce."""
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, WELCOME)
        request_id = client.submit(4).request_id
        client.send(Op.PING, {"nonce": 3})
        require(client.expect(Pong).nonce == 3, "PONG with nonce 3", "another nonce")
        client.send(Op.ACCEPTED, {"request_id": request_id, "handle": HANDLE, "seed": 0})
        client.output(TOKENS[:1], FIRST)
        for nonce in (7, 1, 2**32, 2**53 - 1, 0):
            client.send(Op.PING, {"nonce": nonce} if nonce else {})
            pong = client.expect(Pong, f"with nonce {nonce}")
            require(pong.nonce == nonce, f"PONG with nonce {nonce}", pong)
        client.output(TOKENS[1:], end())
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("7. Operations")
def unasked_answers_are_ignored(tested: ClientUnderTest) -> None:
    """A PONG, and a REPLY, of calls that this client did not make."""
    with tested.client() as client:
        client.open(4)
        client.send(Op.PONG, {"nonce": 99, "num_steps": 5})
        client.send(Op.REPLY, {"call_id": 99, "data": b"xyz"})
        client.output(TOKENS, FIRST, end())
        client.leaves(TOKENS, "length")


@CLIENT_SCENARIOS.add("2. Conventions")
def every_form_of_msgpack_is_read(tested: ClientUnderTest) -> None:
    """Long headers, other orders and explicit nils mean the same."""
    head = b"\xdf\0\0\0\2\xdb\0\0\0\7handles\xc6\0\0\0\4\7\0\0\0\xd9\6tokens\xc5\0\4"
    nils: Body = dict.fromkeys(("num_cached_tokens", "stop_reason", "message"))
    with tested.client(3) as client:
        client.open(3)
        client.send_frames([bytes([Op.OUTPUT]), head + b"\x0b\0\0\0"])
        client.output([12])
        last = {"events": [nils | end()], "counts": None} | output_body({HANDLE: [13]})
        client.send_frames([bytes([Op.OUTPUT]), msgspec.msgpack.encode(last)])
        client.leaves([11, 12, 13], "length")


@CLIENT_SCENARIOS.add("11. Flow control and limits")
def many_small_messages_and_a_huge_one(tested: ClientUnderTest) -> None:
    """Thousands of messages at once, then one with hundreds of thousands of tokens."""
    tokens = [i % 1000 for i in range(NUM_SMALL + NUM_HUGE)]
    with tested.client(len(tokens)) as client:
        client.open(len(tokens))
        for token in tokens[:NUM_SMALL]:
            client.output([token])
        client.output(tokens[NUM_SMALL:], end())
        client.leaves(tokens, "length")
