"""Valid messages of engines, and PING, PONG and BYE, which both sides send."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.protocol_files.bodies import (
    FULL_ENGINE,
    LIMITS,
    MAX_INT,
    METRICS,
    MODEL,
    MORE_STATS,
    SAMPLING,
    STATS,
    STEPS,
)
from tests.protocol_files.lines import (
    ACCEPTED,
    BYE,
    DRAINING,
    ERROR,
    OUTPUT,
    PING,
    PONG,
    REFUSED,
    REPLY,
    WELCOME,
    Body,
    Line,
    Sender,
    changed,
    column,
    floats,
    handles,
    pack,
    valid,
)

NEW: Body = {"new_in_9": {"deep": [1, None, {"x": b"y"}], "float": 0.5}}
NONCES = (1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, MAX_INT)
ERROR_CODES = (
    "invalid_request", "context_length_exceeded", "duplicate_request_id", "overloaded",
    "draining", "engine_dead", "protocol_error", "unknown_op", "no_session",
)  # fmt: skip


def welcomes_and_refusals() -> Iterator[Line]:
    full = FULL_ENGINE[WELCOME]
    least = {name: full[name] for name in ("protocol", "session", "engine_instance")}
    least |= {"model": MODEL, "limits": LIMITS}
    for name, body in {
        "minimal": least,
        "full": full,
        "lower-minor": full | {"protocol": [1, 0]},
        "unknown-capability": full | {"capabilities": ["prefix_caching", "telepathy"]},
        "no-files": changed(full, "model.files", []),
        "unicode": changed(full, "model.model", "/modèles/大きい"),
        "all-default-sampling": changed(full, "model.default_sampling", SAMPLING),
        "queue-limits-nil": full
        | {"limits": full["limits"] | {"max_num_queued_reqs": None, "max_num_queued_tokens": None}},
        "queued-bytes-limit-nil": changed(full, "limits.max_num_queued_bytes", None),
        "client-limit-nil": full | {"limits": full["limits"] | {"max_num_clients": None}},
        "logprobs-unlimited": changed(full, "limits.max_logprobs", -1),
        "logprobs-limit-nil": changed(full, "limits.max_logprobs", None),
        "hidden-size-nil": changed(full, "model.hidden_size", None),
        "numerics-fingerprint-nil": changed(full, "model.numerics_fingerprint", None),
        "file-of-a-later-version": changed(full, "model.files.name", "voices.json"),
    }.items():
        yield valid("engine", WELCOME, name, body)
    for path in ("model", "limits", "model.default_sampling", "model.files"):
        inner = path.rsplit(".", 1)[-1].replace("_", "-")
        raw = pack(changed(full, f"{path}.new_in_9", [{"x": None}]))
        yield valid("engine", WELCOME, f"unknown-field-in-{inner}", full, raw=raw)
    for name, versions in {"one": [[1, 7]], "several": [[1, 7], [2, 0]], "none": []}.items():
        yield valid("engine", REFUSED, name, {"message": "no", "supported": versions})
    for name, retry in {"full": 1.5, "retry-at-once": 0.0, "retry-nil": None}.items():
        yield valid("engine", REFUSED, name, FULL_ENGINE[REFUSED] | {"retry_after_s": retry})


def accepted_and_errors() -> Iterator[Line]:
    for name, body in {
        "full": FULL_ENGINE[ACCEPTED],
        "smallest": {"request_id": "a", "handle": 0, "seed": 0},
        "largest": {"request_id": "x" * 256, "handle": 2**32 - 1, "seed": MAX_INT},
        "unicode": {"request_id": "ü😀", "handle": 1, "seed": 1},
    }.items():
        yield valid("engine", ACCEPTED, name, body)
    for code in ERROR_CODES:
        yield valid("engine", ERROR, code.replace("_", "-"), {"code": code, "message": "why"})
    for name, more in {
        "with-request-id": {"request_id": "a"},
        "with-retry-after": {"request_id": "a", "retry_after_s": 2.5},
        "of-a-later-version": {"code": "out_of_tea", "request_id": "a"},
        "with-retry-after-the-drain": {"code": "draining", "request_id": "a", "retry_after_s": 1.5},
        "with-retry-after-zero": {"retry_after_s": 0.0},
        "with-nils": {"request_id": None, "retry_after_s": None},
    }.items():
        body = {"code": "overloaded", "message": "512 requests wait"} | more
        yield valid("engine", ERROR, name, body)
    whole = {"code": "overloaded", "message": "", "retry_after_s": 2}
    yield valid("engine", ERROR, "retry-after-as-integer", whole, raw=pack(whole))


def outputs() -> Iterator[Line]:
    one: Body = {"handles": handles(7), "tokens": column(42)}
    events: dict[str, Body] = {
        "first-token-uncached": {"handle": 7, "num_cached_tokens": 0},
        "first-token-cached": {"handle": 7, "num_cached_tokens": 16},
        "end-stop": {"handle": 7, "finish_reason": "stop"},
        "end-stop-with-stop-reason": {"handle": 7, "finish_reason": "stop", "stop_reason": 42},
        "end-stop-reason-zero": {"handle": 7, "finish_reason": "stop", "stop_reason": 0},
        "end-repetition": {"handle": 7, "finish_reason": "stop", "stop_cause": "repetition"},
        "end-length": {"handle": 7, "finish_reason": "length"},
        "end-first-and-last": {"handle": 7, "num_cached_tokens": 0, "finish_reason": "length"},
    }
    for name, event in events.items():
        yield valid("engine", OUTPUT, name, one | {"events": [event]})
    for name, event in {
        "end-abort": {"handle": 7, "finish_reason": "abort"},
        "end-abort-with-message": {"handle": 7, "finish_reason": "abort", "message": "engine ends"},
        "end-error": {"handle": 7, "finish_reason": "error", "message": "the step failed: ü"},
        "end-timeout": {"handle": 7, "finish_reason": "timeout"},
        "end-without-tokens": {"handle": 7, "finish_reason": "length"},
        "event-with-nothing": {"handle": 2**32 - 1},
        "end-embedding": {
            "handle": 7,
            "num_cached_tokens": 0,
            "finish_reason": "stop",
            "embedding": floats(0.5, -1.25, 3.0),
        },
        "end-embedding-nil": {"handle": 7, "finish_reason": "abort", "embedding": None},
    }.items():
        yield valid("engine", OUTPUT, name, {"events": [event]})
    two = {"handle": 7, "num_cached_tokens": 0}, {"handle": 7, "finish_reason": "length"}
    for name, body in {
        "empty": {},
        "one-token": one,
        "two-events-of-one-handle": one | {"events": [*two]},
        "three-handles": {"handles": handles(7, 1, 2**32 - 1), "tokens": column(42, 0, 2**31 - 1)},
        "counts": {"handles": handles(7), "tokens": column(1, 2, 3), "counts": handles(3)},
        "counts-of-three": {
            "handles": handles(7, 9, 8),
            "tokens": column(1, 2, 3, 4, 5, 6),
            "counts": handles(3, 1, 2),
        },
        "counts-all-one": one | {"counts": handles(1)},
        "counts-with-a-zero": {
            "handles": handles(7, 9), "tokens": column(5), "counts": handles(0, 1)},
        "counts-of-zero": {"handles": handles(7), "counts": handles(0)},
        "full": FULL_ENGINE[OUTPUT],
        "merged-long": {
            "handles": handles(7, 8),
            "tokens": column(*range(300)),
            "counts": handles(299, 1),
            "events": [two[0], {"handle": 8, "finish_reason": "length"}, two[1]],
        },
        "counts-nil": one | {"counts": None},
        "event-nils": one
        | {
            "events": [
                {"handle": 7, "num_cached_tokens": None, "finish_reason": None,
                 "stop_reason": None, "message": None},
            ],
        },
        "empty-columns": {"handles": b"", "tokens": b"", "counts": b"", "events": []},
    }.items():  # fmt: skip
        yield valid("engine", OUTPUT, name, body)
    ending = one | {"events": [two[1]]}
    yield from log_probabilities(one)
    raw = pack(changed(ending, "events.new_in_9", {"x": 1}))
    yield valid("engine", OUTPUT, "unknown-field-in-event", ending, raw=raw)
    long_bins = b"\x82\xa7handles\xc6\0\0\0\4\7\0\0\0\xa6tokens\xc5\0\4\x2a\0\0\0"
    yield valid("engine", OUTPUT, "long-forms", one, raw=long_bins)


def log_probabilities(one: Body) -> Iterator[Line]:
    """Of output and of prompt tokens; the smallest floats, the rarest candidates."""
    entry: Body = {
        "handles": handles(7), "ranks": handles(1), "counts": handles(1), "token_ids": column(42),
        "logprobs": floats(0.0),
    }  # fmt: skip
    for name, columns in {
        "of-the-token-alone": entry,
        "of-no-token": {},
        "with-empty-columns": dict.fromkeys(entry, b""),
        "of-all-of-a-vocabulary": entry
        | {
            "counts": handles(5), "token_ids": column(42, 3, 42, 1, 0),
            "logprobs": floats(-1.5, -0.25, -1.5, -3e38, -math.inf),
        },
    }.items():  # fmt: skip
        yield valid("engine", OUTPUT, f"logprobs-{name}", one | {"logprobs": columns})
        yield valid("engine", OUTPUT, f"prompt-logprobs-{name}", {"prompt_logprobs": columns})
    nils = {"logprobs": None, "prompt_logprobs": None}
    yield valid("engine", OUTPUT, "logprobs-nil", one | nils)
    merged = {
        "handles": handles(7, 8), "tokens": column(1, 2, 3), "counts": handles(2, 1),
        "logprobs": {
            "handles": handles(7, 8, 7), "ranks": handles(1, 9, 2), "counts": handles(2, 1, 2),
            "token_ids": column(1, 1, 2, 3, 1), "logprobs": floats(-0.5, -0.5, -9.0, -1.0, -0.75),
        },
    }  # fmt: skip
    yield valid("engine", OUTPUT, "logprobs-merged-as-steps-were", merged)
    with_new = one | {"logprobs": entry | {"new_in_9": [1, {"x": None}]}}
    raw = pack(with_new)
    yield valid("engine", OUTPUT, "unknown-field-in-logprobs", one | {"logprobs": entry}, raw=raw)
    yield valid("engine", OUTPUT, "logprobs-of-nobody", {"logprobs": entry})


def replies() -> Iterator[Line]:
    for name, more in {
        "done": {},
        "ok-true": {"ok": True},
        "not-done": {"ok": False, "message": "a request holds blocks"},
        "stats": {"stats": STATS | MORE_STATS},
        "stats-minimal": {"stats": STATS},
        "metrics": {"metrics": METRICS},
        "metrics-empty": {"metrics": []},
        "steps": {"steps": STEPS},
        "steps-none": {"steps": STEPS | {"steps": {}, "requests": []}},
        "steps-phase-of-a-later-version": {
            "steps": changed(STEPS, "requests.way", [["queued", 1234.5], ["loading", 1235.5]])
        },
        "data": {"data": b'{"model": "\xff\x00'},
        "data-empty": {"data": b""},
        "data-300-bytes": {"data": bytes(range(100)) * 3},
        "nils": dict.fromkeys(("message", "stats", "data", "metrics", "steps")),
    }.items():
        yield valid("engine", REPLY, name, {"call_id": 1} | more)
    for name, call_id in {"smallest": 0, "largest": MAX_INT}.items():
        yield valid("engine", REPLY, f"call-id-{name}", {"call_id": call_id})
    body = {"call_id": 1, "stats": STATS}
    raw = pack(changed(body, "stats.new_in_9", 1))
    yield valid("engine", REPLY, "unknown-field-in-stats", body, raw=raw)
    body = {"call_id": 1, "steps": STEPS}
    for path in ("steps", "steps.steps", "steps.requests"):
        raw = pack(changed(body, f"{path}.new_in_9", [1]))
        name = f"unknown-field-in-{path.replace('.', '-')}"
        yield valid("engine", REPLY, name, body, raw=raw)


def drains() -> Iterator[Line]:
    for name, deadline_ms in {"at-once": 0, "later": 30_000, "some-time": None}.items():
        yield valid("engine", DRAINING, name, {"deadline_ms": deadline_ms})
    yield valid("engine", DRAINING, "minimal", {})
    patient = {"nonce": 7, "session_timeout_ms": 1000}
    yield valid("engine", PING, "with-a-clients-field", patient)


def either_way(sender: Sender) -> Iterator[Line]:
    for op in (PING, PONG):
        yield valid(sender, op, "minimal", {})
        for nonce in NONCES:
            yield valid(sender, op, f"nonce-{nonce}", {"nonce": nonce})
        yield valid(sender, op, "nonce-zero", {"nonce": 0}, raw=pack({"nonce": 0}))
        yield valid(sender, op, "nonce-in-64-bits", {"nonce": 5}, raw=_nonce(b"\xcf" + bytes(7)))
        yield valid(sender, op, "nonce-signed", {"nonce": 5}, raw=_nonce(b"\xd3" + bytes(7)))
        yield valid(sender, op, "unknown-field", {"nonce": 7}, raw=pack({"nonce": 7} | NEW))
        if sender == "client":
            twice = b"\x82\xa5nonce\x01\xa5nonce\x07"
            yield valid(sender, op, "duplicate-nonce", {"nonce": 7}, raw=twice)
        wide = b"\xdf\0\0\0\1\xdb\0\0\0\5nonce\x07"
        yield valid(sender, op, "long-map-and-key", {"nonce": 7}, raw=wide)
    for name, num_steps in {"zero": 0, "largest": MAX_INT}.items():
        yield valid(sender, PONG, f"steps-{name}", {"nonce": 7, "num_steps": num_steps})
        yield valid(sender, PONG, f"step-age-{name}", {"nonce": 7, "step_age_ms": num_steps})
    yield valid(sender, PONG, "steps-nil", {"num_steps": None, "step_age_ms": None})
    for name, body in {
        "minimal": {}, "full": {"reason": "done"}, "unicode": {"reason": "até já 👋"},
    }.items():  # fmt: skip
        yield valid(sender, BYE, name, body)
    yield valid(sender, BYE, "unknown-field", {"reason": "x"}, raw=pack({"reason": "x"} | NEW))


def _nonce(head: bytes) -> bytes:
    return b"\x81\xa5nonce" + head + b"\x05"


def valid_engine_lines() -> Iterator[Line]:
    """All of them, and one unknown field at the top of each message."""
    yield from welcomes_and_refusals()
    yield from accepted_and_errors()
    yield from outputs()
    yield from replies()
    yield from drains()
    yield from either_way("engine")
    for op in (WELCOME, REFUSED, ACCEPTED, OUTPUT, ERROR, REPLY, DRAINING):
        body = FULL_ENGINE[op]
        yield valid("engine", op, "unknown-field", body, raw=pack(NEW | body))
