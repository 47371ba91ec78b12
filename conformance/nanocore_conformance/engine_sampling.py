"""Rules for engines: the ends of every range of SUBMIT, and what lies beyond."""

from __future__ import annotations

import math
import re

from nanocore.protocol.errors import shorten
from nanocore.protocol.messages import MAX_PRIORITY, MIN_PRIORITY, Op
from nanocore_conformance.engine_samples import session_of_1_5
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer, submit_body
from nanocore_conformance.report import BrokenError, require

MAX_SEED = 2**53 - 1
ACCEPTED: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 0, 1e-5, 5e-324, 1.0, 1e300),
    "top_p": (5e-324, 0.5, 1.0, 1),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "min_p": (0.0, 5e-324, 1.0, 1),
    "seed": (0, MAX_SEED, None),
    "max_tokens": (1, 2),
    "stop_token_ids": ([], [0], [0, 1, 2, 3] * 32),
    "ignore_eos": (False, True),
    "skip_reading_prefix_cache": (False, True),
}
ACCEPTED_SINCE_1_5: dict[str, tuple[object, ...]] = {
    "n": (1, 2),
    "min_tokens": (0, 1, 2),
    "presence_penalty": (-2, -2.0, 0, 2.0),
    "frequency_penalty": (-2, -2.0, 0, 2.0),
    "repetition_penalty": (0.01, 1, 100.0),
    "allowed_token_ids": (None, [0], [0, 1, 2, 3] * 256),
    "logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "logit_bias": ([], [[0, 100]], [[0, -100.0], [1, 5e-324]]),
    "bad_words_token_ids": ([], [[0]], [[0, 1, 2, 3]] * 256, [[0, 1] * 512]),
}
REFUSED: dict[str, tuple[object, ...]] = {
    "temperature": (-5e-324, -1.0, math.nan, math.inf, -math.inf, "1", True, None),
    "top_p": (0.0, -0.5, 1.0000000000000002, math.nan, math.inf, "1", None),
    "top_k": (-2, 2**31, 1.0, "1", True, None),
    "min_p": (-5e-324, 1.0000000000000002, math.nan, math.inf, "1", None),
    "seed": (-1, MAX_SEED + 1, 1.0, "1", True),
    "max_tokens": (0, -1, 2**31, 1.0, "1", True),
    "stop_token_ids": ([0] * 129, [-1], [2**31 - 1], ["0"], "0", None),
    "ignore_eos": (0, 1, "true", None),
    "skip_reading_prefix_cache": (0, 1, "true", None),
}
REFUSED_SINCE_1_5: dict[str, tuple[object, ...]] = {
    "n": (0, -1, 129, 1.0, "1", True, None),
    "min_tokens": (-1, 3, 2**31, 1.0, "1", None),
    "presence_penalty": (-2.0000001, 2.0000001, math.nan, math.inf, "1", None),
    "frequency_penalty": (-2.0000001, 2.0000001, math.nan, -math.inf, "1", None),
    "repetition_penalty": (0.0, 0.0099, 100.01, -1.0, math.nan, math.inf, "1", None),
    "allowed_token_ids": ([], [0] * 1025, [-1], [2**31 - 1], [1.0], ["0"], "0", 0),
    "logprobs": (-2, 2**31, 1.0, "1", True),
    "prompt_logprobs": (-2, 2**31, 1.0, "1", True),
    "logit_bias": (
        [[0, 100.1]], [[0, -100.1]], [[0, math.nan]], [[0, math.inf]], [[0, 1.0], [0, 1.0]],
        [[-1, 1.0]], [[2**31 - 1, 1.0]], [[i, 1.0] for i in range(1025)], [[0]], [[0, 1, 2]],
        [["0", 1.0]], [[0, "1"]], [0], {"0": 1.0}, None,
    ),
    "bad_words_token_ids": (
        [[]], [[0], []], [[0]] * 257, [[0] * 1025], [[-1]], [[2**31 - 1]], [[[0]]], [["0"]], [0],
        ["a"], None,
    ),
}  # fmt: skip
REFUSED_SINCE_1_6: dict[str, tuple[object, ...]] = {
    "structured_outputs": (
        {}, {"disable_any_whitespace": True}, {"json": "{}", "regex": "a"}, {"json_schema": "{}"},
        {"json": {}}, {"json": " " * 139_264 + "1"}, {"regex": "é" * 69_632 + "e"}, {"regex": 1},
        {"choice": []}, {"choice": [""]}, {"choice": ["a"] * 4097}, {"choice": "a"},
        {"structural_tag": {"structures": [], "triggers": ["a"]}}, "{}", ["a"], True,
    ),
}  # fmt: skip
REFUSED_SINCE_1_7: dict[str, tuple[object, ...]] = {"pooling": ("cls", "", 1, True, ["mean"])}
NEAREST = {
    "temprature": "temperature", "max_token": "max_tokens", "topp": "top_p", "logprob": "logprobs",
    "frequency_penality": "frequency_penalty", "stop_tokens_ids": "stop_token_ids",
    "bad_words_tokens_ids": "bad_words_token_ids",
}  # fmt: skip
"""What is mistyped, and what an ERROR must guess that it should be."""
WRONG_TYPES: tuple[tuple[str, object, str], ...] = (
    ("prompt_token_ids", [1, 2, 3], "array"), ("prompt_token_ids", "abc", "str"),
    ("prompt_token_ids", None, "nil"), ("sampling", [1], "array"), ("sampling", b"abc", "bin"),
    ("priority", {}, "map"), ("priority", 0.5, "float"), ("cache_salt", True, "bool"),
)  # fmt: skip
FOREIGN_WORDS = {"object", "bytes", "null", "None", "True", "dict", "list", "string", "undefined"}


def accepted(peer: Peer, what: str, request_id: str, **fields: object) -> None:
    """Submit, and take the request's end; `what` is said if it is refused."""
    body = submit_body(request_id, max_tokens=2) | fields
    peer.send(Op.SUBMIT, body)
    try:
        peer.finish(*peer.accepted(request_id).samples)
    except BrokenError as error:
        raise BrokenError(f"{what} to be accepted", error.got) from None


def refused(peer: Peer, what: str, naming: str, request_id: str, **fields: object) -> None:
    """Submit, and take the refusal, which must name the field."""
    peer.send(Op.SUBMIT, submit_body(request_id) | fields)
    try:
        peer.refused("invalid_request", request_id, naming=naming)
    except BrokenError as error:
        raise BrokenError(f"{shorten(what)}: {error.expected}", error.got) from None


@ENGINE_RULES.add("9. Sampling parameters")
def sampling_ranges_include_their_ends(engine: EngineUnderTest) -> None:
    """Values at both ends of each range are accepted, and so is an int for a float."""
    peer = engine.session()
    newer = ACCEPTED_SINCE_1_5 if peer.welcome.protocol >= (1, 5) else {}
    for name, values in (ACCEPTED | newer).items():
        for value in values:
            sampling = {"max_tokens": 2} | {name: value}
            accepted(peer, f"{name}={value}", "a", sampling=sampling)


@ENGINE_RULES.add("9. Sampling parameters")
def sampling_beyond_its_ranges_is_refused_by_name(engine: EngineUnderTest) -> None:
    """What lies beyond a range, NaN, and values of other types are refused, naming the field."""
    peer = engine.session()
    newer = REFUSED_SINCE_1_5 if peer.welcome.protocol >= (1, 5) else {}
    newer = newer | (REFUSED_SINCE_1_6 if peer.welcome.protocol >= (1, 6) else {})
    newer = newer | (REFUSED_SINCE_1_7 if peer.welcome.protocol >= (1, 7) else {})
    for name, values in (REFUSED | newer).items():
        for value in values:
            sampling = {"max_tokens": 2} | {name: value}
            refused(peer, f"{name}={value!r}", name, "a", sampling=sampling)
    for name in ("temprature", "best_of", "stop"):
        refused(peer, f"unknown {name}", name, "a", sampling={name: 1})
    peer.still_streams()


@ENGINE_RULES.add("9. Sampling parameters")
def mistyped_parameters_are_guessed(engine: EngineUnderTest) -> None:
    """The ERROR of an unknown parameter names it and the nearest one that is known."""
    peer = session_of_1_5(engine)
    for name, meant in NEAREST.items():
        refused(peer, f"unknown {name}", meant, "a", sampling={name: 1})
    peer.still_streams()


@ENGINE_RULES.add("2. Conventions")
def errors_speak_of_msgpack(engine: EngineUnderTest) -> None:
    """An ERROR about a type names it in msgpack's words, not in those of the engine's language."""
    peer = engine.session()
    for name, value, kind in WRONG_TYPES:
        peer.send(Op.SUBMIT, submit_body("a") | {name: value})
        message = peer.refused("invalid_request", "a", naming=name).message
        words = set(re.findall(r"[A-Za-z0-9]+", message))
        require(kind in words, f"a message that names {kind!r}", message)
        foreign = sorted(words & FOREIGN_WORDS)
        require(not foreign, f"a message about a {kind} without {foreign}", message)
    peer.still_streams()


@ENGINE_RULES.add("SUBMIT")
def submits_strings_have_lengths(engine: EngineUnderTest) -> None:
    """request_id and cache_salt of the lengths that the limits name are taken, others refused."""
    peer = engine.session()
    id_chars = peer.welcome.limits.max_request_id_chars
    salt_chars = peer.welcome.limits.max_cache_salt_chars
    for character in ("x", "é", "😀"):
        longest_id, longest_salt = character * id_chars, character * salt_chars
        accepted(peer, f"a request_id of {id_chars} {character}", longest_id)
        accepted(peer, f"a cache_salt of {salt_chars} {character}", "a", cache_salt=longest_salt)
        too_long = longest_id + character
        refused(peer, f"a request_id of {id_chars + 1} {character}", "request_id", too_long)
        salt = longest_salt + character
        refused(peer, f"a cache_salt of {len(salt)} characters", "cache_salt", "a", cache_salt=salt)
    refused(peer, "an empty cache_salt", "cache_salt", "a", cache_salt="")
    peer.still_streams()


@ENGINE_RULES.add("6. Versions and capabilities")
def priority_needs_its_capability(engine: EngineUnderTest) -> None:
    """A priority is taken by engines with the capability, and refused by the others."""
    peer = engine.session()
    accepted(peer, "priority=0", "a", priority=0)
    for priority in (MIN_PRIORITY - 1, MAX_PRIORITY + 1, 0.5, "1"):
        refused(peer, f"priority={priority!r}", "priority", "a", priority=priority)
    for priority in (MIN_PRIORITY, -1, 1, MAX_PRIORITY):
        may = priority > 0 or peer.welcome.role == "admin"
        if "priority" in peer.welcome.capabilities and may:
            accepted(peer, f"priority={priority}", "a", priority=priority)
        else:
            refused(peer, f"priority={priority}", "priority", "a", priority=priority)
    peer.still_streams()
