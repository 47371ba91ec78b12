"""P1, P2, P8: whatever a request asks for, it ends once, and no other one changes by a bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from nanocore.protocol.messages import Op
from nanocore.protocol.sampling import EngineSamplingParams
from tests.engine_core.grammars.evil_inputs import EVIL_INPUTS
from tests.hostile.messages import submit
from tests.reliability.bystanders import Answers, run_beside
from tests.reliability.ends import Ends
from tests.reliability.visitor import visitor
from tests.reliability.watched_engine import MAX_NUM_SEQS, WatchedEngine

ODD = [
    None, True, 0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**64 - 1, -(2**63), 0.0, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "1", b"", b"\1\0\0", b"\xff" * 8, [], [-1],
    [2**31], [10**6], [[1, float("nan")]], [[0, 1.0], [0, 1.0]], [[]], {}, {"json": "{"}, {"x": 1},
]  # fmt: skip
"""Values for any field: of other types, not finite, out of range, no tokens of the model."""
BOMBS = ["json_refs_doubling", "json_max_items_huger", "regex_groups_30000", "grammar_negations"]
FIELDS = ("prompt_token_ids", "output_token_ids", "priority", "cache_salt", "timeout_s")


def odd_bodies(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Each field of a request with each odd value; some of them are right, and served."""
    for field in (*FIELDS, *EngineSamplingParams.__struct_fields__):
        for value in ODD:
            body = submit(rng)
            (body if field in FIELDS else body["sampling"])[field] = value
            yield body


def test_a_request_with_an_odd_value_in_any_field_is_served_or_refused_and_harms_nobody(
    engine: WatchedEngine, quiet: Answers
) -> None:
    def attack() -> None:
        bodies = list(odd_bodies(random.Random(1)))
        with visitor(engine.endpoint) as client:
            ends = Ends(client)
            for start in range(0, len(bodies), 20):
                for body in bodies[start : start + 20]:
                    body["sampling"].setdefault("max_tokens", 2)
                    ends.submit(body)
                ends.hear_all()
        ids = [body["request_id"] for body in bodies]
        served = set(ends.ended)
        assert len(ids) > 500
        assert sorted([*ends.refused, *served]) == sorted(ids)
        assert 0 < len(served) < len(ends.refused)

    run_beside(engine.endpoint, quiet, attack)


@pytest.mark.parametrize("name", BOMBS)
def test_a_structured_output_made_to_break_things_ends_and_harms_nobody(
    engine: WatchedEngine, quiet: Answers, name: str
) -> None:
    kind, text = EVIL_INPUTS[name]

    def attack() -> None:
        with visitor(engine.endpoint) as client:
            ends, body = Ends(client), submit(random.Random(2))
            body["sampling"]["structured_outputs"] = {kind: text}
            ends.submit(body)
            ends.hear_all()
            assert [*ends.refused, *ends.ended] == [body["request_id"]]

    run_beside(engine.endpoint, quiet, attack)


def test_requests_aborted_at_any_moment_end_once_and_harm_nobody(
    engine: WatchedEngine, quiet: Answers
) -> None:
    """Before they are admitted, in a prompt's chunks, while they are decoded, and after."""

    def attack() -> None:
        rng, num_samples = random.Random(3), dict[str, int]()
        with visitor(engine.endpoint) as client:
            ends = Ends(client)
            for _ in range(150):
                body = submit(rng, prompt_token_ids=b"\7\0\0\0" * rng.choice([1, 20, 900]))
                body["sampling"] |= {"max_tokens": rng.choice([1, 3, 60]), "n": rng.choice([1, 4])}
                is_bad = rng.random() < 0.2
                if is_bad:
                    body["sampling"]["temperature"] = -1.0
                num_samples[body["request_id"]] = 1 if is_bad else body["sampling"]["n"]
                ends.submit(body)
                for _ in range(rng.randrange(6)):
                    client.send(Op.PING, nonce=1)
                    ends.hear()
                ids = list(num_samples)
                client.send(Op.ABORT, request_ids=rng.choices([*ids[-8:], "unknown"], k=2))
                while ends.num_running > MAX_NUM_SEQS:
                    ends.hear()
            client.send(Op.ABORT, request_ids=ids)
            ends.hear_all()
        assert Counter([*ends.refused, *ends.ended]) == num_samples

    run_beside(engine.endpoint, quiet, attack)


def test_duplicates_and_foreign_ids_touch_nobody(engine: WatchedEngine, quiet: Answers) -> None:
    """Of an id that is in use; and ids and handles as the bystanders have them."""

    def attack() -> None:
        rng = random.Random(4)
        with visitor(engine.endpoint) as client:
            client.send(Op.CONTROL, call_id=1, operation="pause")  # the first one does not end
            ends = Ends(client)
            ends.submit(submit(rng, request_id="twice"))
            for _ in range(50):
                ends.submit(submit(rng, request_id="twice"))
                names = [f"{rng.randrange(100)}" for _ in range(5)]
                handles = b"".join(rng.randrange(2**16).to_bytes(4, "little") for _ in range(20))
                client.send(Op.ABORT, request_ids=names, handles=handles)
            while len(ends.refused) < 50:
                ends.hear()
            client.send(Op.CONTROL, call_id=2, operation="resume")
            ends.hear_all()
        assert ends.refused == ["twice"] * 50
        assert ends.ended == ["twice"]

    run_beside(engine.endpoint, quiet, attack)


def test_nothing_that_a_request_says_is_in_the_log(engine: WatchedEngine) -> None:
    """Neither of one that is served nor of one that is refused: its ids, its prompt, its salt."""
    secret = "canary"
    prompt = [100, 101, 102, 103, 104, 105]
    column = b"".join(token.to_bytes(4, "little") for token in prompt)
    before = len(engine.log())
    with visitor(engine.endpoint) as client:
        ends = Ends(client)
        for number, temperature in enumerate((0.0, -1.0, 1e9)):
            body = submit(random.Random(11), request_id=f"{secret}-{number}", cache_salt=secret)
            body |= {"prompt_token_ids": column}
            body["sampling"] |= {"temperature": temperature, "structured_outputs": None}
            ends.submit(body)
        pattern = {"regex": f"{secret}("}
        body = submit(random.Random(12))
        body["sampling"]["structured_outputs"] = pattern
        ends.submit(body)
        ends.hear_all()
        assert ends.ended
        assert ends.refused
    said = engine.log()[before:]
    assert secret not in said
    assert str(prompt)[1:-1] not in said
