"""Bodies that are maps, with a field of the wrong type, out of range, missing or unknown.

A float stands for an integer as 1.5 in what engines send: languages whose numbers are all floats
cannot tell 1.0 from 1. What clients send must be told apart by the engine, in any language.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.protocol_files import structured_outputs
from tests.protocol_files.bodies import (
    FULL_CLIENT,
    FULL_ENGINE,
    MAX_INT,
    METRICS,
    MORE_STATS,
    PROMPT,
    STATS,
    STEPS,
)
from tests.protocol_files.lines import (
    ABORT,
    ACCEPTED,
    BYE,
    CONTROL,
    DRAINING,
    ERROR,
    HELLO,
    NAMES,
    OUTPUT,
    PING,
    PONG,
    REFUSED,
    REPLY,
    SUBMIT,
    WELCOME,
    Body,
    Line,
    Sender,
    changed,
    column,
    floats,
    handles,
    malformed,
    malformed_frames,
    pack,
    without,
)

WRONG: dict[str, dict[str, object]] = {
    "int": {"float": 1.5, "str": "1", "bool": True, "array": [1], "bin": b"\1", "map": {}},
    "float": {"str": "0.5", "bool": True, "array": [0.5], "bin": b"\0"},
    "bool": {"int": 1, "str": "true", "array": [True]},
    "str": {"int": 1, "bin": b"a", "array": ["a"], "bool": True},
    "bin": {"str": "aaaa", "array": [1, 2], "int": 1},
    "list": {"map": {}, "int": 1, "str": "a", "bin": b"\0\0\0\0"},
    "map": {"array": [], "int": 1, "str": "a", "bool": True},
    "version": {"one": [1], "three": [1, 0, 0], "str": "1.0", "of-str": ["1", "0"],
                "of-floats": [1.5, 0], "int": 1, "map": {}},
}  # fmt: skip
"""Values that are not of a type, by their own."""

# Type of every field; "!": required, "?": nil is allowed. Of lists, the first item's fields too.
FIELDS: dict[Sender, dict[int, dict[str, str]]] = {
    "client": {
        HELLO: {"protocol": "version!", "client": "str"},
        SUBMIT: {
            "request_id": "str!", "prompt_token_ids": "bin!", "sampling": "map?",
            "priority": "int", "cache_salt": "str?", "sampling.temperature": "float",
            "sampling.top_p": "float", "sampling.top_k": "int", "sampling.min_p": "float",
            "sampling.seed": "int?", "sampling.max_tokens": "int?",
            "sampling.stop_token_ids": "list", "sampling.ignore_eos": "bool",
            "sampling.skip_reading_prefix_cache": "bool", "sampling.n": "int",
            "sampling.min_tokens": "int", "sampling.presence_penalty": "float",
            "sampling.frequency_penalty": "float", "sampling.repetition_penalty": "float",
            "sampling.allowed_token_ids": "list?", "sampling.logprobs": "int?",
            "sampling.prompt_logprobs": "int?", "sampling.logit_bias": "list",
            "sampling.bad_words_token_ids": "list", "sampling.structured_outputs": "map?",
            "sampling.pooling": "str?", "sampling.repetition_detection": "map?",
            "output_token_ids": "bin", "timeout_s": "float?",
        },
        ABORT: {"request_ids": "list!", "handles": "bin"},
        PING: {"nonce": "int", "session_timeout_ms": "int?"},
        PONG: {"nonce": "int", "num_steps": "int?", "step_age_ms": "int?"},
        CONTROL: {
            "call_id": "int!", "operation": "str!", "file": "str?", "offset": "int", "after": "int",
        },
        BYE: {"reason": "str"},
    },
    "engine": {
        WELCOME: {
            "protocol": "version!", "session": "str!", "engine_instance": "str!", "model": "map!",
            "limits": "map!", "capabilities": "list",
            **{f"model.{name}": "str!" for name in ("model", "architecture", "dtype")},
            **{f"model.{name}": "int!"
               for name in ("vocab_size", "max_model_len", "block_size", "num_blocks")},
            "role": "str", "model.eos_token_ids": "list!", "model.default_sampling": "map",
            "model.hidden_size": "int?", "model.numerics_fingerprint": "str?",
            "model.files": "list", "model.files.num_bytes": "int!", "model.files.sha256": "str!",
            **{f"limits.{name}": "int!" for name in
               ("max_frame_bytes", "max_num_seqs", "ping_interval_ms", "session_timeout_ms")},
            "limits.max_request_id_chars": "int", "limits.max_cache_salt_chars": "int",
            "limits.max_num_queued_reqs": "int?", "limits.max_num_queued_tokens": "int?",
            "limits.max_file_chunk_bytes": "int", "limits.max_num_clients": "int?",
            "limits.max_logprobs": "int?", "limits.max_num_queued_bytes": "int?",
        },
        REFUSED: {"message": "str!", "supported": "list!", "retry_after_s": "float?"},
        ACCEPTED: {
            "request_id": "str!", "handle": "int!", "seed": "int!", "not_held": "list",
        },
        OUTPUT: {
            "handles": "bin", "tokens": "bin", "counts": "bin?", "events": "list",
            "events.handle": "int!", "events.num_cached_tokens": "int?",
            "events.finish_reason": "str?", "events.stop_reason": "int?",
            "events.stop_cause": "str?", "events.message": "str?",
            "events.code": "str?",
            "events.embedding": "bin?",
            "logprobs": "map?", "prompt_logprobs": "map?",
            **{f"{name}.{column}": "bin" for name in ("logprobs", "prompt_logprobs")
               for column in ("handles", "ranks", "counts", "token_ids", "logprobs")},
        },
        ERROR: {
            "code": "str!", "message": "str!", "request_id": "str?", "retry_after_s": "float?",
        },
        PING: {"nonce": "int", "session_timeout_ms": "int?"},
        PONG: {"nonce": "int", "num_steps": "int?", "step_age_ms": "int?"},
        REPLY: {
            "call_id": "int!", "ok": "bool", "message": "str?", "stats": "map?", "data": "bin?",
            **{f"stats.{name}": "int!" for name in STATS
               if name not in ("kv_cache_usage_perc", "paused")},
            "stats.kv_cache_usage_perc": "float!", "stats.paused": "bool!",
            "stats.prefix_cache_hit_rate": "float", "stats.num_clients": "int",
            "stats.num_protocol_errors": "int", "stats.groups": "list",
            "stats.groups.name": "str!", "stats.groups.num_blocks": "int!",
            "stats.groups.num_free_blocks": "int!",
            "stats.groups.prefix_cache_lost_tokens": "int",
            **{f"stats.spec_decode_num_{name}": "int"
               for name in ("drafts", "draft_tokens", "accepted_tokens")},
            "stats.spec_decode_num_accepted_tokens_per_pos": "list",
            "metrics": "list?", "metrics.name": "str!", "metrics.type": "str!",
            "metrics.help": "str!", "metrics.samples": "list!", "metrics.bounds": "list",
            "steps": "map?", "steps.now_s": "float!", "steps.stats": "map!", "steps.steps": "map!",
            **{f"steps.steps.{name}": "list" for name in STEPS["steps"]},
            "steps.requests": "list!", "steps.requests.handle": "int!",
            **{f"steps.requests.num_{name}_tokens": "int!"
               for name in ("prompt", "cached", "output")},
            "steps.requests.way": "list!", "steps.requests.request_id": "str",
            "steps.requests.finish_reason": "str?",
        },
        DRAINING: {"deadline_ms": "int?"},
        BYE: {"reason": "str"},
    },
}  # fmt: skip
EXACT_INTS: dict[Sender, tuple[tuple[int, str], ...]] = {
    "client": (
        (PING, "nonce"), (PONG, "nonce"), (PONG, "num_steps"), (PONG, "step_age_ms"),
        (CONTROL, "call_id"), (CONTROL, "offset"), (CONTROL, "after"),
        (PING, "session_timeout_ms"),
    ),
    "engine": (
        (PING, "nonce"), (PONG, "nonce"), (PONG, "num_steps"), (PONG, "step_age_ms"),
        (REPLY, "call_id"), (ACCEPTED, "handle"), (OUTPUT, "events.handle"),
        (REPLY, "steps.requests.handle"),
    ),
}  # fmt: skip
HANDLES = ("handle", "events.handle", "steps.requests.handle")
BAD_BIASES: tuple[object, ...] = (
    [1], [[1]], [[1, 2.0, 3]], [[]], [["1", 2.0]], [[1, "2"]], [[1.0, 2.0]], [[1, True]],
    [[[1], 2.0]], [{"1": 2.0}], [None], [[1, None]],
)  # fmt: skip
BAD_WORDS: tuple[object, ...] = (
    [1], ["1"], [[1.0]], [["1"]], [[True]], [[[1]]], [None], [[None]], [b"\1\0\0\0"], [{}],
)  # fmt: skip
BAD_IDS: tuple[object, ...] = ([1.0], ["1"], [True], [[1]], [None])
NEEDED = {
    WELCOME: ("protocol",),
    ACCEPTED: ("request_id", "handle"),
    OUTPUT: ("handles", "tokens", "counts", "events", "events.handle", "events.finish_reason"),
    ERROR: ("code", "message", "request_id"),
    PING: ("nonce",),
    REPLY: ("call_id", "data"),
}
"""What every client acts on, so that every client must notice another type there, or nothing."""
MAX_RETURNED_ID_CHARS = 1024
LENIENT = ("bin", "nil", "bool")
"""Types that some languages' msgpack libraries take for others, as they do a str for a bin."""


def good(sender: Sender, op: int) -> Body:
    """A body in which every field of the tables can be changed."""
    if sender == "client":
        return FULL_CLIENT[op]
    whole = {"call_id": 1, "stats": STATS | MORE_STATS, "metrics": METRICS}
    whole["steps"] = STEPS
    return whole if op == REPLY else FULL_ENGINE[op]


def answer(sender: Sender, op: int, body: Body) -> dict[str, str]:
    """What such a map is answered by: a SUBMIT is named if its id can be read and returned."""
    if sender == "engine" or op != SUBMIT:
        return {"code": "protocol_error"}
    request_id = body.get("request_id")
    named = isinstance(request_id, str) and len(request_id) <= MAX_RETURNED_ID_CHARS
    return {"code": "invalid_request"} | ({"request_id": body["request_id"]} if named else {})


def bad(sender: Sender, op: int, name: str, body: Body) -> Line:
    return malformed(sender, op, name.replace("_", "-"), body, **answer(sender, op, body))


def strict(sender: Sender, op: int, path: str, wrong: str = "") -> dict[str, bool]:
    """Marks what only a strict client refuses: PROTOCOL.md, section 4, lets others take it."""
    is_str_for_bin = FIELDS[sender][op].get(path, "").startswith("bin") and wrong == "str"
    is_lenient = wrong in LENIENT or is_str_for_bin
    needed = sender == "client" or (path in NEEDED.get(op, ()) and not is_lenient)
    return {} if needed else {"strict": True}


def wrong_types(sender: Sender) -> Iterator[Line]:
    for op, fields in FIELDS[sender].items():
        for path, kind in fields.items():
            wrongs = dict(WRONG[kind.rstrip("!?")])
            if not kind.endswith("?"):
                wrongs["nil"] = None
            for name, value in wrongs.items():
                body = changed(good(sender, op), path, value)
                yield bad(sender, op, f"{path}-is-{name}", body) | strict(sender, op, path, name)
            if kind.endswith("!"):
                body = without(good(sender, op), path)
                yield bad(sender, op, f"without-{path}", body) | strict(sender, op, path)
    inner: list[tuple[Sender, int, str, object]] = [
        ("client", ABORT, "request_ids", [1]), ("client", ABORT, "request_ids", ["a", None]),
        ("client", SUBMIT, "sampling.stop_token_ids", ["1"]),
        ("client", SUBMIT, "sampling.stop_token_ids", [1.5]),
        ("client", SUBMIT, "sampling.stop_token_ids", [True]),
        ("client", SUBMIT, "sampling.top_k", 1.0), ("client", PING, "nonce", 1.0),
        ("client", SUBMIT, "sampling.n", 1.0), ("client", SUBMIT, "sampling.logprobs", 1.0),
        *(("client", SUBMIT, "sampling.logit_bias", value) for value in BAD_BIASES),
        *(("client", SUBMIT, "sampling.bad_words_token_ids", value) for value in BAD_WORDS),
        *(("client", SUBMIT, "sampling.allowed_token_ids", value) for value in BAD_IDS),
        ("engine", WELCOME, "model.eos_token_ids", ["1"]), ("engine", WELCOME, "capabilities", [1]),
        ("engine", WELCOME, "model.files", [1]), ("engine", REFUSED, "supported", [1]),
        ("engine", REFUSED, "supported", [[1]]), ("engine", OUTPUT, "events", [1]),
        ("engine", OUTPUT, "events", [[]]), ("engine", OUTPUT, "events", [None]),
        ("engine", OUTPUT, "events.finish_reason", "bored"),
        ("engine", REPLY, "steps.steps.number", ["1"]),
        ("engine", REPLY, "steps.requests.way", [["queued"]]),
        ("engine", REPLY, "steps.requests.way", [[1.5, "queued"]]),
    ]  # fmt: skip
    for i, (of, op, path, value) in enumerate(inner):
        if of == sender:
            body = changed(good(sender, op), path, value)
            yield bad(sender, op, f"{path}-bad-inside-{i}", body) | strict(sender, op, "")


def out_of_range(sender: Sender) -> Iterator[Line]:
    for op, path in EXACT_INTS[sender]:
        largest = 2**32 - 1 if path in HANDLES else MAX_INT
        for value in (-1, largest + 1, 2**63, 2**64 - 1, -(2**63)):
            name = f"{path}-of-{value}".replace("--", "-minus-")
            body = changed(good(sender, op), path, value)
            yield bad(sender, op, name, body) | strict(sender, op, "")


def unknown_fields() -> Iterator[Line]:
    """Refused where only clients speak: a typo is an error, not a default."""
    for op, path in (
        (HELLO, "cliend"), (SUBMIT, "stop"), (SUBMIT, "prioritty"), (SUBMIT, "sampling.temprature"),
        (SUBMIT, "sampling.best_of"), (SUBMIT, "sampling.stop"), (SUBMIT, "sampling.bad_words"),
        (SUBMIT, "sampling.logprob"), (SUBMIT, "sampling.json"), (SUBMIT, "sampling.guided_json"),
        (SUBMIT, "sampling.response_format"), (ABORT, "handle"), (ABORT, "request_id"),
        (CONTROL, "ofset"),
    ):  # fmt: skip
        yield bad("client", op, f"unknown-{path}", changed(FULL_CLIENT[op], path, 1))
    yield malformed("client", PING, "key-is-int", b"\x81\x01\x02")


def submit_values() -> Iterator[Line]:
    """Values that no engine takes, whatever its model is. A prompt of 2^31 - 1 is above each."""
    small, largest = {"request_id": "a", "prompt_token_ids": PROMPT}, 2**31 - 1
    samplings: dict[str, Body] = {
        "temperature-negative": {"temperature": -0.1}, "temperature-nan": {"temperature": math.nan},
        "temperature-infinite": {"temperature": math.inf},
        "temperature-minus-infinite": {"temperature": -math.inf},
        "top-p-zero": {"top_p": 0.0}, "top-p-above-one": {"top_p": 1.0000001},
        "top-p-negative": {"top_p": -1.0}, "top-p-nan": {"top_p": math.nan},
        "top-k-minus-two": {"top_k": -2}, "top-k-too-large": {"top_k": 2**31},
        "top-k-of-64-bits": {"top_k": 2**64 - 1},
        "min-p-negative": {"min_p": -0.1}, "min-p-above-one": {"min_p": 1.1},
        "min-p-nan": {"min_p": math.nan}, "min-p-infinite": {"min_p": math.inf},
        "seed-negative": {"seed": -1}, "seed-too-large": {"seed": MAX_INT + 1},
        "max-tokens-zero": {"max_tokens": 0}, "max-tokens-negative": {"max_tokens": -1},
        "max-tokens-too-large": {"max_tokens": 2**31},
        "stop-token-ids-129": {"stop_token_ids": [0] * 129},
        "stop-token-ids-negative": {"stop_token_ids": [0, -1]},
        "stop-token-ids-too-large": {"stop_token_ids": [largest]},
        "stop-token-ids-of-64-bits": {"stop_token_ids": [2**64 - 1]},
    }  # fmt: skip
    samplings |= bad_parameters_of_1_5()
    samplings |= {
        "pooling-of-no-kind": {"pooling": "cls"}, "pooling-empty": {"pooling": ""},
        "pooling-with-max-tokens": {"pooling": "last", "max_tokens": 2},
        "pooling-with-n": {"pooling": "last", "n": 2},
        "pooling-with-temperature": {"pooling": "mean", "temperature": 0.5},
        "pooling-with-logprobs": {"pooling": "mean", "logprobs": 0},
        "pooling-with-structured-outputs": {
            "pooling": "last", "structured_outputs": {"json_object": True},
        },
    }  # fmt: skip
    samplings |= {
        f"repetition-{name}": {"repetition_detection": detection}
        for name, detection in {
            "empty": {}, "without-size": {"min_count": 2}, "without-count": {"max_pattern_size": 2},
            "of-size-zero": {"max_pattern_size": 0, "min_count": 2},
            "of-size-1025": {"max_pattern_size": 1025, "min_count": 2},
            "of-size-true": {"max_pattern_size": True, "min_count": 2},
            "of-count-one": {"max_pattern_size": 2, "min_count": 1},
            "of-count-above": {"max_pattern_size": 2, "min_count": 2**20 + 1},
            "of-size-below-zero": {"max_pattern_size": 2, "min_pattern_size": -1, "min_count": 2},
            "of-sizes-crossed": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "of-new": {"max_pattern_size": 2, "min_count": 2, "mode": "occurrence"},
        }.items()
    }  # fmt: skip
    samplings |= {
        "pooling-with-repetition-detection": {
            "pooling": "last", "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
        },
    }  # fmt: skip
    samplings |= {
        f"structured-{name}": {"structured_outputs": wanted}
        for name, wanted in structured_outputs.malformed().items()
    }
    for name, sampling in samplings.items():
        yield bad("client", SUBMIT, name, small | {"sampling": sampling})
    for name, change in {
        "request-id-empty": {"request_id": ""},
        "request-id-too-long": {"request_id": "x" * 257},
        "request-id-257-two-byte-characters": {"request_id": "é" * 257},
        "request-id-longest-that-is-returned": {"request_id": "é" * 1024},
        "request-id-too-long-to-return": {"request_id": "é" * 1025},
        "request-id-too-long-to-return-and-wrong-type": {"request_id": "x" * 1025, "priority": "1"},
        "cache-salt-empty": {"cache_salt": ""}, "cache-salt-too-long": {"cache_salt": "s" * 1025},
        "prompt-empty": {"prompt_token_ids": b""},
        "prompt-of-three-bytes": {"prompt_token_ids": PROMPT[:3]},
        "prompt-of-five-bytes": {"prompt_token_ids": PROMPT[:5]},
        "prompt-of-seven-bytes": {"prompt_token_ids": PROMPT[:7]},
        "prompt-big-endian": {"prompt_token_ids": b"\0\0\0\1\0\0\0\2\0\0\0\3"},
        "prompt-negative": {"prompt_token_ids": column(1, -1)},
        "prompt-most-negative": {"prompt_token_ids": column(-(2**31), 1)},
        "prompt-above-every-vocabulary": {"prompt_token_ids": column(1, 2, largest)},
        "resumed-of-three-bytes": {"output_token_ids": PROMPT[:3]},
        "resumed-negative": {"output_token_ids": column(1, -1)},
        "resumed-above-every-vocabulary": {"output_token_ids": column(largest)},
        "resumed-with-n": {"output_token_ids": column(1), "sampling": {"n": 2}},
        "resumed-with-pooling": {"output_token_ids": column(1), "sampling": {"pooling": "last"}},
        "timeout-zero": {"timeout_s": 0.0}, "timeout-negative": {"timeout_s": -1.0},
        "timeout-too-long": {"timeout_s": 1e6 + 1}, "timeout-nan": {"timeout_s": math.nan},
        "timeout-infinite": {"timeout_s": math.inf},
        "priority-too-low": {"priority": -(2**31) - 1}, "priority-too-high": {"priority": 2**31},
    }.items():  # fmt: skip
        yield bad("client", SUBMIT, name, small | change)
    nan32 = b"\x83" + pack(small)[1:] + b"\xa8sampling\x81\xabtemperature\xca\x7f\xc0\x00\x00"
    named = {"code": "invalid_request", "request_id": "a"}
    yield malformed("client", SUBMIT, "temperature-nan-in-32-bits", nan32, **named)
    yield malformed(
        "client", SUBMIT, "priority-without-its-policy", small | {"priority": 1},
        presumes="fcfs scheduling", **named,
    )  # fmt: skip
    too_long = small | {"sampling": {"max_tokens": largest}}
    code = {"code": "context_length_exceeded", "request_id": "a"}
    yield malformed("client", SUBMIT, "longer-than-any-model", too_long, **code)


def bad_parameters_of_1_5() -> dict[str, Body]:
    """By name; each is out of range by its value alone."""
    numbers: dict[str, tuple[float, ...]] = {
        "n": (0, -1, 129, 2**64 - 1), "min_tokens": (-1, 2**31),
        "presence_penalty": (-2.0000001, 2.0000001, math.nan, math.inf),
        "frequency_penalty": (-2.0000001, 2.0000001, math.nan, -math.inf),
        "repetition_penalty": (0.0, -1.0, 0.0099, 100.1, math.nan, math.inf),
        "logprobs": (-2, 2**31), "prompt_logprobs": (-2, 2**31),
    }  # fmt: skip
    lists: dict[str, Body] = {
        "min-tokens-above-max-tokens": {"min_tokens": 3, "max_tokens": 2},
        "allowed-token-ids-empty": {"allowed_token_ids": []},
        "allowed-token-ids-1025": {"allowed_token_ids": [0] * 1025},
        "allowed-token-ids-negative": {"allowed_token_ids": [0, -1]},
        "allowed-token-ids-too-large": {"allowed_token_ids": [2**31 - 1]},
        "allowed-token-ids-of-64-bits": {"allowed_token_ids": [2**64 - 1]},
        "logit-bias-1025": {"logit_bias": [[i, 0.5] for i in range(1025)]},
        "logit-bias-of-a-token-twice": {"logit_bias": [[1, 0.5], [2, 0.5], [1, 0.5]]},
        "logit-bias-too-low": {"logit_bias": [[1, -100.1]]},
        "logit-bias-too-high": {"logit_bias": [[1, 100.1]]},
        "logit-bias-nan": {"logit_bias": [[1, math.nan]]},
        "logit-bias-infinite": {"logit_bias": [[1, math.inf]]},
        "logit-bias-minus-infinite": {"logit_bias": [[1, -math.inf]]},
        "logit-bias-negative-token": {"logit_bias": [[-1, 0.5]]},
        "logit-bias-token-too-large": {"logit_bias": [[2**31 - 1, 0.5]]},
        "logit-bias-token-of-64-bits": {"logit_bias": [[2**64 - 1, 0.5]]},
        "bad-words-257": {"bad_words_token_ids": [[0]] * 257},
        "bad-words-of-1025-tokens": {"bad_words_token_ids": [[0] * 512, [1] * 513]},
        "bad-words-empty-word": {"bad_words_token_ids": [[1], []]},
        "bad-words-negative-token": {"bad_words_token_ids": [[1, -1]]},
        "bad-words-token-too-large": {"bad_words_token_ids": [[2**31 - 1]]},
        "bad-words-token-of-64-bits": {"bad_words_token_ids": [[1], [2**64 - 1]]},
    }
    single = {
        f"{name.replace('_', '-')}-of-{value}".replace("--", "-minus-"): {name: value}
        for name, values in numbers.items()
        for value in values
    }
    return single | lists


def columns() -> Iterator[Line]:
    """OUTPUT columns that do not fit together."""
    for name, body in {
        "handles-cut": {"handles": handles(7)[:3], "tokens": column(1)},
        "tokens-cut": {"handles": handles(7), "tokens": column(1, 2)[:5]},
        "counts-cut": {"handles": handles(7), "tokens": column(1), "counts": b"\1\0"},
        "tokens-without-handles": {"tokens": column(1)},
        "handles-without-tokens": {"handles": handles(7)},
        "more-tokens-than-handles": {"handles": handles(7), "tokens": column(1, 2)},
        "fewer-tokens-than-handles": {"handles": handles(7, 8), "tokens": column(1)},
        "more-counts-than-handles": {
            "handles": handles(7), "tokens": column(1, 2), "counts": handles(1, 1)},
        "fewer-counts-than-handles": {
            "handles": handles(7, 8), "tokens": column(1, 2), "counts": handles(2)},
        "counts-empty": {"handles": handles(7), "tokens": column(1), "counts": b""},
        "counts-above-tokens": {
            "handles": handles(7), "tokens": column(1, 2), "counts": handles(3)},
        "counts-below-tokens": {
            "handles": handles(7), "tokens": column(1, 2, 3), "counts": handles(2)},
        "counts-whose-sum-wraps": {
            "handles": handles(7, 8), "tokens": column(1), "counts": handles(2**32 - 1, 2)},
        "counts-largest": {
            "handles": handles(7), "tokens": column(1), "counts": handles(2**32 - 1)},
    }.items():  # fmt: skip
        yield malformed("engine", OUTPUT, f"columns-{name}", body)
    yield from log_probabilities()


def log_probabilities() -> Iterator[Line]:
    """Those that do not fit together; strict, because who asks for none need not look."""
    more: Body = {
        "handles": handles(8), "ranks": handles(1), "counts": handles(1), "token_ids": column(1),
        "logprobs": floats(-1.0),
    }  # fmt: skip
    for field in ("logprobs", "prompt_logprobs"):
        entries = FULL_ENGINE[OUTPUT][field]
        broken = {f"{name}-cut": {name: entries[name][:-1]} for name in more}
        broken |= {f"{name}-too-short": {name: entries[name][:-4]} for name in more}
        broken |= {f"{name}-too-long": {name: entries[name] + more[name]} for name in more}
        broken |= {f"without-{name}": {name: b""} for name in more}
        sums = handles(*[2**32 - 1] * (len(entries["counts"]) // 4))
        last = {"token_ids": entries["token_ids"][:-4], "logprobs": entries["logprobs"][:-4]}
        none = handles(*[3] * (len(entries["counts"]) // 4 - 1), 0)
        if field == "prompt_logprobs":
            broken["no-candidate"] = last | {"counts": none}
        broken["counts-whose-sum-wraps"] = {"counts": sums}
        for name, change in broken.items():
            body = FULL_ENGINE[OUTPUT] | {field: entries | change}
            line = malformed("engine", OUTPUT, f"{field}-{name}".replace("_", "-"), body)
            yield line | {"strict": True}


def aborted_handles() -> Iterator[Line]:
    for length in (1, 3, 5):
        body = {"request_ids": ["a"], "handles": handles(7, 8)[:length]}
        yield malformed("client", ABORT, f"handles-of-{length}-bytes", body)


def impatience() -> Iterator[Line]:
    for timeout_ms in (0, 999):
        body = {"nonce": 7, "session_timeout_ms": timeout_ms}
        yield malformed("client", PING, f"session-timeout-ms-of-{timeout_ms}", body)


def before_hello() -> Iterator[Line]:
    """Nothing counts before HELLO; what is no message is told so first."""
    for op in (SUBMIT, ABORT, PING, PONG, CONTROL):
        body = FULL_CLIENT[op]
        if op in (SUBMIT, ABORT):  # of 1.0: an older engine is to find nothing else wrong
            body = {"request_ids": ["a"]}
            body = {"request_id": "a", "prompt_token_ids": PROMPT} if op == SUBMIT else body
        yield malformed("client", op, "before-hello", body, "no_session", before_hello=True)
    for name, body in {"no-protocol": {"client": "x"}, "nil-protocol": {"protocol": None}}.items():
        yield malformed("client", HELLO, f"before-hello-{name}", body, before_hello=True)
    for name, frames, code in (
        ("frame-before-hello", [b"\x01"], "protocol_error"),
        ("unknown-op-before-hello", [b"\xff", b"\x80"], "unknown_op"),
    ):
        yield malformed_frames("client", name, frames, code) | {"before_hello": True}
    again = {"protocol": [1, 0]}
    yield malformed("client", HELLO, "in-an-open-session", again)


def field_lines(sender: Sender) -> Iterator[Line]:
    """All of one direction."""
    assert all(op in NAMES for op in FIELDS[sender])
    yield from wrong_types(sender)
    yield from out_of_range(sender)
    if sender == "client":
        yield from unknown_fields()
        yield from submit_values()
        yield from aborted_handles()
        yield from impatience()
        yield from before_hello()
    else:
        yield from columns()
