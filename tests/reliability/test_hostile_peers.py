"""P3, P4, P5: bytes that are no message, peers that never read, and more requests than fit."""

from __future__ import annotations

import multiprocessing
import random
from contextlib import suppress

from nanocore.protocol.messages import Op, Reply, Welcome
from nanocore.protocol.sockets.zmtp import pack_message
from tests.hostile.messages import draw, frames, hello, submit
from tests.hostile.peers import Attacker, churn
from tests.protocol.zmtp_peer import ZmtpPeer
from tests.reliability.bystanders import Answers, run_beside
from tests.reliability.ends import Ends
from tests.reliability.visitor import visitor
from tests.reliability.watched_engine import MAX_NUM_QUEUED_REQS, MAX_NUM_SEQS, WatchedEngine

NUM_HOSTILE_MESSAGES = 2000
NUM_CONNECTIONS = 60
NUM_SESSIONS = 3  # the attacker's, one that watches, the bystanders'


def test_bytes_of_any_kind_are_answered_or_dropped_and_harm_nobody(
    engine: WatchedEngine, quiet: Answers
) -> None:
    """Noise, spoiled and cut messages, wrong frame counts, bombs: the kinds of tests/hostile."""

    def attack() -> None:
        rng, attacker, num_sent = random.Random(5), Attacker(engine.endpoint), 0
        while num_sent < NUM_HOSTILE_MESSAGES:
            _, messages = draw(rng)
            for message in messages:
                attacker.send(message)
            num_sent += len(messages)
        attacker.finish()
        codes = ("protocol_error", "unknown_op", "invalid_request")
        assert all(attacker.answers[f"ERROR {code}"] for code in codes)

    run_beside(engine.endpoint, quiet, attack)
    assert "Traceback" not in engine.log()


def test_peers_that_speak_another_protocol_or_leave_at_once_harm_nobody(
    engine: WatchedEngine, quiet: Answers
) -> None:
    results, theirs = multiprocessing.Pipe(duplex=False)

    def attack() -> None:
        churn(engine.endpoint, 6, NUM_CONNECTIONS, theirs)

    run_beside(engine.endpoint, quiet, attack)
    with results, theirs:
        assert sum(results.recv()["sent"].values()) == NUM_CONNECTIONS
    assert "Traceback" not in engine.log()


def test_who_asks_for_ever_and_never_reads_loses_its_session_and_harms_nobody(
    engine: WatchedEngine, quiet: Answers
) -> None:
    """What waits for it is bounded."""

    def attack() -> None:
        body = submit(random.Random(7))
        body["sampling"]["max_tokens"] = 500
        question = frames(Op.CONTROL, call_id=1, operation="read_file", file="tokenizer.json")
        questions = b"".join(pack_message(question)) * 1000
        with ZmtpPeer(engine.endpoint) as peer, visitor(engine.endpoint) as other:
            peer.greet()
            peer.send(*hello())
            peer.send(*frames(Op.SUBMIT, **body))
            while other.stats().num_clients < NUM_SESSIONS:
                pass
            peer.socket.setblocking(False)
            num_bytes = 0
            while other.stats().num_clients == NUM_SESSIONS:
                with suppress(BlockingIOError):
                    num_bytes += peer.socket.send(questions[num_bytes % len(questions) :])

    run_beside(engine.endpoint, quiet, attack)


def test_what_is_bounded_is_announced(engine: WatchedEngine) -> None:
    with visitor(engine.endpoint) as client:
        limits = client.hear_of(Welcome).limits
    assert limits.max_num_seqs == MAX_NUM_SEQS
    assert limits.max_num_queued_reqs == MAX_NUM_QUEUED_REQS
    unknown = {name for name in limits.__struct_fields__ if getattr(limits, name) is None}
    assert unknown == set()


def test_a_flood_is_refused_with_a_hint_before_any_step_and_harms_nobody_who_runs(
    engine: WatchedEngine, quiet: Answers
) -> None:
    """While the engine is paused, so that every answer is one that the model has no part in."""
    num_too_many = 40

    def attack() -> None:
        rng = random.Random(8)
        with visitor(engine.endpoint) as client:
            ends = Ends(client)
            client.send(Op.CONTROL, call_id=1, operation="pause")
            assert client.hear_of(Reply).ok
            num_steps = client.stats().num_steps
            bodies = [submit(rng) for _ in range(MAX_NUM_QUEUED_REQS + num_too_many)]
            for body in bodies:
                ends.submit(body)
            ends.hear_answers()
            assert client.stats().num_steps == num_steps
            assert len(ends.errors) >= num_too_many
            for error in ends.errors:
                assert error.code == "overloaded"
                assert error.retry_after_s is not None
                assert error.retry_after_s > 0
            client.send(Op.CONTROL, call_id=2, operation="resume")
            ends.hear_all()
            ids = [body["request_id"] for body in bodies]
            assert sorted([*ends.refused, *ends.ended]) == sorted(ids)

    run_beside(engine.endpoint, quiet, attack, one_round=True)
