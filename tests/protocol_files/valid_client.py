"""Valid messages of clients: minimal and full ones, the ends of every range, every wire form.

They go into an open session, unless `before_hello` says otherwise. `presumes` names what an engine
must have been started with.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol_files import structured_outputs
from tests.protocol_files.bodies import FULL_CLIENT, MAX_INT, PROMPT
from tests.protocol_files.lines import (
    ABORT,
    BYE,
    CONTROL,
    HELLO,
    PING,
    PONG,
    SUBMIT,
    Body,
    Line,
    column,
    handles,
    ignored,
    pack,
    valid,
)

SUBMIT_BODY: Body = {"request_id": "a", "prompt_token_ids": PROMPT}
SAMPLING_BOUNDARIES: dict[str, Body] = {
    "temperature-zero": {"temperature": 0.0},
    "temperature-of-greedy-limit": {"temperature": 1e-5},
    "temperature-smallest": {"temperature": 5e-324},
    "temperature-huge": {"temperature": 1e300},
    "top-p-smallest": {"top_p": 5e-324},
    "top-p-one": {"top_p": 1.0},
    "top-k-all": {"top_k": -1},
    "top-k-off": {"top_k": 0},
    "top-k-one": {"top_k": 1},
    "top-k-largest": {"top_k": 2**31 - 1},
    "min-p-zero": {"min_p": 0.0},
    "min-p-one": {"min_p": 1.0},
    "seed-zero": {"seed": 0},
    "seed-largest": {"seed": MAX_INT},
    "max-tokens-one": {"max_tokens": 1},
    "stop-token-ids-none": {"stop_token_ids": []},
    "stop-token-ids-128": {"stop_token_ids": [0, 1, 2, 3] * 32},
    "ignore-eos-false": {"ignore_eos": False},
    "sampling-empty": {},
    "n-one": {"n": 1},
    "n-128": {"n": 128},
    "n-with-seed-largest": {"n": 2, "seed": MAX_INT},
    "min-tokens-zero": {"min_tokens": 0},
    "min-tokens-as-max-tokens": {"min_tokens": 2},
    "presence-penalty-lowest": {"presence_penalty": -2.0},
    "presence-penalty-highest": {"presence_penalty": 2.0},
    "frequency-penalty-lowest": {"frequency_penalty": -2.0},
    "frequency-penalty-highest": {"frequency_penalty": 2.0},
    "repetition-penalty-lowest": {"repetition_penalty": 0.01},
    "repetition-penalty-highest": {"repetition_penalty": 100.0},
    "allowed-token-ids-one": {"allowed_token_ids": [3]},
    "allowed-token-ids-1024": {"allowed_token_ids": [0, 1, 2, 3] * 256},
    "logprobs-zero": {"logprobs": 0},
    "prompt-logprobs-zero": {"prompt_logprobs": 0},
    "logit-bias-none": {"logit_bias": []},
    "logit-bias-lowest": {"logit_bias": [[0, -100.0]]},
    "logit-bias-highest": {"logit_bias": [[0, 100.0], [3, 100.0]]},
    "bad-words-none": {"bad_words_token_ids": []},
    "bad-words-256": {"bad_words_token_ids": [[0, 1, 2, 3]] * 256},
    "bad-words-of-1024-tokens": {"bad_words_token_ids": [[0, 1, 2, 3] * 256]},
    "everything-longest": {
        "logit_bias": [[0, 0.5]], "allowed_token_ids": [0, 1, 2, 3] * 256,
        "bad_words_token_ids": [[0, 1, 2, 3]] * 256, "stop_token_ids": [0, 1, 2, 3] * 32,
    },
}  # fmt: skip


INTEGERS: Body = {
    "temperature": 0, "top_p": 1, "min_p": 0, "max_tokens": 2, "presence_penalty": 1,
    "frequency_penalty": -1, "repetition_penalty": 2, "logit_bias": [[1, 3]],
}  # fmt: skip


def hellos() -> Iterator[Line]:
    for name, body in {
        "minimal": {"protocol": [1, 0]},
        "full": FULL_CLIENT[HELLO],
        "unicode": {"protocol": [1, 7], "client": "Ω-client/1 ✓"},
        "later-minor": {"protocol": [1, 255]},
        "other-major": {"protocol": [2, 0]},
        "earlier-major": {"protocol": [0, 9]},
    }.items():
        yield valid("client", HELLO, name, body, before_hello=True)


def submits() -> Iterator[Line]:
    yield valid("client", SUBMIT, "minimal", SUBMIT_BODY)
    yield valid("client", SUBMIT, "full", FULL_CLIENT[SUBMIT])
    for name, sampling in SAMPLING_BOUNDARIES.items():
        # A short answer, unless it is max_tokens that is tried.
        short = {"max_tokens": 2} if "max_tokens" not in sampling and sampling else {}
        yield valid("client", SUBMIT, name, SUBMIT_BODY | {"sampling": sampling | short})
    for name, change in {
        "request-id-longest": {"request_id": "x" * 256},
        "request-id-256-two-byte-characters": {"request_id": "é" * 256},
        "request-id-256-four-byte-characters": {"request_id": "😀" * 256},
        "request-id-control-characters": {"request_id": "a\0b\n\u202e"},
        "cache-salt-shortest": {"cache_salt": "s"},
        "cache-salt-longest": {"cache_salt": "é" * 1024},
        "prompt-one-id": {"prompt_token_ids": column(0)},
        "prompt-eight-ids": {"prompt_token_ids": column(3, 2, 1, 0, 0, 1, 2, 3)},
    }.items():
        yield valid("client", SUBMIT, name, SUBMIT_BODY | change)
    for name, priority in {"lowest": -(2**31), "highest": 2**31 - 1, "some": 5}.items():
        body = SUBMIT_BODY | {"priority": priority}
        yield valid("client", SUBMIT, f"priority-{name}", body, presumes="priority scheduling")
    nils = {"sampling": {"seed": None, "max_tokens": None}, "cache_salt": None}
    yield valid("client", SUBMIT, "nil-inside", SUBMIT_BODY | nils)
    yield valid("client", SUBMIT, "nil-sampling", SUBMIT_BODY | {"sampling": None})
    for name, wanted in structured_outputs.VALID.items():
        sampling = {"structured_outputs": wanted, "max_tokens": 2}
        yield valid("client", SUBMIT, f"structured-{name}", SUBMIT_BODY | {"sampling": sampling})
    nil = {"sampling": {"structured_outputs": None, "max_tokens": 2}}
    yield valid("client", SUBMIT, "structured-outputs-nil", SUBMIT_BODY | nil)
    for name, pooled in {
        "last": {"pooling": "last"}, "mean": {"pooling": "mean", "max_tokens": 1},
        "mean-uncached": {"pooling": "mean", "skip_reading_prefix_cache": True},
        "nil": {"pooling": None, "max_tokens": 2},
    }.items():  # fmt: skip
        yield valid("client", SUBMIT, f"pooling-{name}", SUBMIT_BODY | {"sampling": pooled})
    for name, detection in {
        "shortest": {"max_pattern_size": 1, "min_count": 2},
        "longest": {"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 2**20},
        "from-zero": {"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 3},
        "nil": None,
    }.items():
        sampling = {"repetition_detection": detection, "max_tokens": 2}
        yield valid("client", SUBMIT, f"repetition-{name}", SUBMIT_BODY | {"sampling": sampling})
    for name, change in {
        "resumed": {"output_token_ids": column(3)},
        "resumed-at-nothing": {"output_token_ids": b""},
        "resumed-with-its-seed": {
            "output_token_ids": column(3, 1, 2, 0),
            "sampling": {"seed": MAX_INT, "ignore_eos": True, "max_tokens": 16},
        },
        "timeout-shortest": {"timeout_s": 5e-324},
        "timeout-longest": {"timeout_s": 1e6},
        "timeout-nil": {"timeout_s": None},
    }.items():  # fmt: skip
        yield valid("client", SUBMIT, name, SUBMIT_BODY | change)
    yield from submit_forms()


def submit_forms() -> Iterator[Line]:
    """One meaning, other bytes."""
    defaults = SUBMIT_BODY | {
        "sampling": {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
            "max_tokens": None, "stop_token_ids": [], "ignore_eos": False,
            "skip_reading_prefix_cache": False, "n": 1, "min_tokens": 0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "allowed_token_ids": None,
            "logprobs": None, "prompt_logprobs": None, "logit_bias": [], "bad_words_token_ids": [],
        },
        "priority": 0,
        "cache_salt": None,
    }  # fmt: skip
    yield valid("client", SUBMIT, "explicit-defaults", defaults)
    backwards = dict(reversed(FULL_CLIENT[SUBMIT].items()))
    yield valid("client", SUBMIT, "other-order", backwards, raw=pack(backwards))
    yield valid(
        "client", SUBMIT, "integers-for-floats",
        SUBMIT_BODY | {"sampling": INTEGERS}, raw=pack(SUBMIT_BODY | {"sampling": INTEGERS}),
    )  # fmt: skip
    start = b"\xaarequest_id\xa1a" + b"\xb0prompt_token_ids\xc4\x0c" + PROMPT
    half = SUBMIT_BODY | {"sampling": {"temperature": 0.5}}
    yield valid(
        "client", SUBMIT, "float32", half,
        raw=b"\x83" + start + b"\xa8sampling\x81\xabtemperature\xca\x3f\x00\x00\x00",
    )  # fmt: skip
    long_forms = (
        b"\xdf\x00\x00\x00\x03"
        b"\xdb\x00\x00\x00\x0arequest_id\xda\x00\x01a"
        b"\xd9\x10prompt_token_ids\xc6\x00\x00\x00\x0c" + PROMPT +
        b"\xa8sampling\xde\x00\x02\xaamax_tokens\xcf\x00\x00\x00\x00\x00\x00\x00\x02"
        b"\xaestop_token_ids\xdd\x00\x00\x00\x01\xd3\x00\x00\x00\x00\x00\x00\x00\x03"
    )  # fmt: skip
    meaning = SUBMIT_BODY | {"sampling": {"max_tokens": 2, "stop_token_ids": [3]}}
    yield valid("client", SUBMIT, "long-forms", meaning, raw=long_forms)
    twice = b"\x84" + start + b"\xaarequest_id\xa1b" + b"\xa8sampling\x82\xaamax_tokens\x09"
    yield valid(
        "client", SUBMIT, "duplicate-keys",
        SUBMIT_BODY | {"request_id": "b", "sampling": {"max_tokens": 2}},
        raw=twice + b"\xaamax_tokens\x02",
    )  # fmt: skip


def aborts_and_controls() -> Iterator[Line]:
    for name, ids in {
        "none": [], "one": ["a"], "two": ["a", "b"], "same-twice": ["a", "a"],
        "unicode": ["ü", "😀"], "empty-id": [""], "many": [f"r{i}" for i in range(300)],
    }.items():  # fmt: skip
        yield valid("client", ABORT, name, {"request_ids": ids})
    for name, column_ in {
        "no-handles": b"", "a-handle": handles(7), "the-same-handle-twice": handles(7, 7),
        "many-handles": handles(*range(300)),
    }.items():  # fmt: skip
        yield valid("client", ABORT, name, {"request_ids": [], "handles": column_})
    for call_id, operation in enumerate(("stats", "reset_prefix_cache", "pause", "resume")):
        body = {"call_id": call_id, "operation": operation}
        yield valid("client", CONTROL, operation.replace("_", "-"), body)
    drain = {"call_id": 4, "operation": "drain"}
    yield valid("client", CONTROL, "drain", drain, presumes="nothing better to do")
    read = {"call_id": MAX_INT, "operation": "read_file"}
    for name, more in {
        "read-file-full": FULL_CLIENT[CONTROL],
        "read-file-start": read | {"file": "tokenizer.json"},
        "read-file-far-behind-the-end": read | {"file": "tokenizer.json", "offset": MAX_INT},
        "read-file-of-no-name": read,
        "read-file-unknown": read | {"file": "model.safetensors"},
        "read-file-outside": read | {"file": "../../../../etc/passwd"},
        "read-file-empty-name": read | {"file": ""},
        "unknown-operation": {"call_id": 3, "operation": "no_such_operation"},
        "empty-operation": {"call_id": 3, "operation": ""},
        "metrics": {"call_id": 5, "operation": "metrics"},
        "steps": {"call_id": 6, "operation": "steps"},
        "steps-after": {"call_id": 6, "operation": "steps", "after": 5},
        "steps-after-the-largest": {"call_id": 6, "operation": "steps", "after": MAX_INT},
    }.items():
        yield valid("client", CONTROL, name, more)


def patience() -> Iterator[Line]:
    for name, timeout_ms in {"shortest": 1000, "longest": MAX_INT, "nil": None}.items():
        body = {"nonce": 7, "session_timeout_ms": timeout_ms}
        yield valid("client", PING, f"session-timeout-{name}", body)


def ignored_messages() -> Iterator[Line]:
    """What is answered by nothing."""
    deep = {"nonce": 1, "new_in_9": {"deep": [1, None, {"x": b"y"}]}}
    yield ignored(PONG, "of-nobodys-ping", {"nonce": 12345})
    yield ignored(PONG, "with-an-unknown-field", deep)
    yield ignored(ABORT, "of-an-unknown-request", {"request_ids": ["never-submitted"]})
    nobodys = {"request_ids": [], "handles": handles(2**32 - 1)}
    yield ignored(ABORT, "of-an-unknown-handle", nobodys, presumes="protocol 1.5")
    yield ignored(BYE, "before-hello", {}, before_hello=True)
    yield ignored(BYE, "before-hello-with-reason", {"reason": "lost"}, before_hello=True)


def valid_client_lines() -> Iterator[Line]:
    """All of them."""
    yield from hellos()
    yield from submits()
    yield from aborts_and_controls()
    yield from patience()
    yield from ignored_messages()
