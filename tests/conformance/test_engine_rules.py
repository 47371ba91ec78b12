"""The rules for engines: a healthy engine passes them all, and each defect is found by its rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanocore_conformance.engine_rules import ENGINE_RULES
from nanocore_conformance.engine_under_test import EngineUnderTest
from nanocore_conformance.peer_socket import PeerSocket
from tests.conformance.fake_engine import fake_engine
from tests.end_to_end.forked import engine

PATIENCE_S = 60.0
SHORT_PATIENCE_S = 3.0
"""For engines that owe an answer: it is never given, however long one waits."""
SINCE_1_5 = {
    f"nanocore_conformance.engine_{name}" for name in ("samples", "logprobs", "parameters")
}
STRUCTURED = "nanocore_conformance.engine_structured"
EMBEDDINGS = "embeddings-are-of-the-prompts-tokens"
REPETITION = "repetition-ends-the-request"
RESUMED = "resumed-requests-go-on-as-they-would-have"
METRICS, STEPS = "metrics-say-what-they-are", "steps-tell-what-was-computed"
WAYS = "ways-of-requests-are-told"
RULES = {rule.name: rule for rule in ENGINE_RULES.all}
USUAL = [rule.name for rule in ENGINE_RULES.all if not rule.slow and not rule.flag]
SINCE_1_9 = {
    rule.name
    for rule in ENGINE_RULES.all
    if rule.body.__module__ == "nanocore_conformance.engine_resumed" and not rule.flag
}
WATCHED = {
    rule.name
    for rule in ENGINE_RULES.all
    if rule.body.__module__ == "nanocore_conformance.engine_watched"
}
"""Of 1.10 and 1.11."""


def under_test(endpoint: str, patience_s: float = PATIENCE_S) -> EngineUnderTest:
    return EngineUnderTest(lambda: PeerSocket(endpoint), patience_s)


@pytest.fixture
def endpoint(short_path: Path) -> str:
    return f"ipc://{short_path}/engine.sock"


@pytest.mark.campaign
def test_a_healthy_engine_passes_every_rule(endpoint: str) -> None:
    with fake_engine(endpoint):
        one = under_test(endpoint)
        results = [one.run(RULES[name]) for name in USUAL]
    assert [str(result) for result in results if result.outcome != "pass"] == []


@pytest.mark.campaign
@pytest.mark.parametrize("minor", [5, 6])
def test_an_engine_without_structured_outputs_is_not_asked_for_them(
    endpoint: str, minor: int
) -> None:
    with fake_engine(endpoint, minor=minor, structured=False):
        one = under_test(endpoint)
        results = [one.run(RULES[name]) for name in USUAL]
    assert [str(result) for result in results if result.outcome == "fail"] == []
    skipped = {result.name for result in results if result.outcome == "skip"}
    assert (
        skipped
        == {name for name, rule in RULES.items() if rule.body.__module__ == STRUCTURED}
        - ({"structured-outputs-need-their-capability"} if minor == 6 else set())
        | {EMBEDDINGS, REPETITION}
        | SINCE_1_9
        | WATCHED
    )


@pytest.mark.campaign
def test_an_engine_of_1_4_is_not_asked_for_what_came_later(endpoint: str) -> None:
    with fake_engine(endpoint, minor=4):
        one = under_test(endpoint)
        results = [one.run(RULES[name]) for name in USUAL]
    assert [str(result) for result in results if result.outcome == "fail"] == []
    skipped = {result.name for result in results if result.outcome == "skip"}
    assert (
        skipped
        == {
            name for name, rule in RULES.items() if rule.body.__module__ in SINCE_1_5 | {STRUCTURED}
        }
        | {"mistyped-parameters-are-guessed", EMBEDDINGS, REPETITION}
        | SINCE_1_9
        | WATCHED
    )


@pytest.fixture(
    scope="module",
    params=[
        (),
        pytest.param(
            (
                "--scheduling-policy",
                "priority",
                "--no-enable-prefix-caching",
                "--max-num-seqs",
                "20",
            ),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["fcfs", "priority"],
)
def our_engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineUnderTest]:
    """Our engine with a queue that is soon full, as is the engine; for the tests of one run."""
    flags = ("--max-num-queued-reqs", "60", "--max-num-clients", "20")
    with engine(tiny_model, *flags, *request.param) as running:
        yield under_test(running.endpoint)


@pytest.mark.parametrize("name", USUAL)
def test_our_engine_passes(our_engine: EngineUnderTest, name: str) -> None:
    result = our_engine.run(RULES[name])
    assert result.outcome == "pass", str(result)


DEFECTS = {
    "no-vocabulary": ("welcome-is-complete", "vocab_size of at least 1"),
    "minor-kept": ("lower-minor-is-spoken", "protocol (1, 0)"),
    "minor-echoed": ("higher-minor-is-answered-in-the-engines-own", "protocol (1, 1000000)"),
    "other-major-welcome": ("other-major-is-refused", "REFUSED for a client of 0.0"),
    "no-versions": ("other-major-is-refused", "supported versions"),
    "second-hello-welcome": ("second-hello-leaves-the-session-intact", "'protocol_error'"),
    "no-session-unsaid": ("nothing-counts-before-hello", "'no_session'"),
    "deaf-after-hello": ("what-follows-hello-at-once-is-served", "ACCEPTED of 'a'"),
    "newer-fields-unanswered": ("newer-fields-are-taken-or-refused", "ACCEPTED or ERROR"),
    "clients-endless": ("sessions-above-the-limit-are-refused-for-a-while", "for session 21"),
    "refusal-without-retry": (
        "sessions-above-the-limit-are-refused-for-a-while",
        "with retry_after_s",
    ),
    "session-follows": ("too-large-frame-ends-the-connection", "ERROR none within"),
    "frames-end-others": ("many-frames-harm-nobody-else", "no_session"),
    "bye-unheard": ("nothing-counts-after-bye", "'no_session'"),
    "one-session-id": ("nothing-counts-after-bye", "another session id"),
    "instance-changes": ("instance-names-the-engines-run", "engine_instance"),
    "no-pings": ("engine-asks-for-signs-of-life", "PING"),
    "outputs-to-all": ("sessions-do-not-see-each-other", "was not accepted"),
    "foreign-abort": ("foreign-requests-cannot-be-aborted", "to run on"),
    "bye-goes-on": ("bye-aborts-the-sessions-requests", "was not accepted"),
    "bye-uncounted": ("bye-aborts-the-sessions-requests", "num_aborts"),
    "accepts-unknown-field": ("malformed-messages-are-refused", "client-control-"),
    "silent-on-garbage": ("malformed-messages-are-refused", "client-one-frame nothing within"),
    "wrong-code": ("malformed-messages-are-refused", "invalid_request"),
    "session-ends-on-garbage": ("malformed-messages-are-refused", "no_session"),
    "garbage-ends-requests": ("malformed-messages-leave-running-requests-alone", "more tokens"),
    "needs-sorted-fields": ("valid-messages-are-taken", "client-submit-other-order"),
    "pong-answered": ("what-asks-nothing-is-answered-by-nothing", "PONG"),
    "unknown-op-unsaid": ("every-op-byte-has-its-answer", "op 0x00"),
    "two-ends": ("request-runs-from-accepted-to-one-end", "nothing of a request after its end"),
    "token-after-end": ("request-runs-from-accepted-to-one-end", "after its end"),
    "no-end": ("request-runs-from-accepted-to-one-end", "have ended"),
    "one-token-more": ("request-runs-from-accepted-to-one-end", "2 tokens"),
    "wrong-reason": ("request-runs-from-accepted-to-one-end", "'stop'"),
    "token-beyond": ("request-runs-from-accepted-to-one-end", "below vocab_size=50"),
    "counts-wrong": ("request-runs-from-accepted-to-one-end", "columns that fit"),
    "output-before-accepted": ("request-runs-from-accepted-to-one-end", "after their ACCEPTED"),
    "handle-reused": ("handles-are-never-reused", "never given before"),
    "cached-untold": ("cached-tokens-are-told-with-the-first-token", "with the first token"),
    "cached-twice": ("cached-tokens-are-told-with-the-first-token", "num_cached_tokens once"),
    "cached-again": ("cached-tokens-are-told-with-the-first-token", "first token only"),
    "not-greedy": ("greedy-requests-repeat", "again"),
    "seed-ignored": ("seeds-repeat", "with seed 7"),
    "seed-untold": ("seeds-repeat", "seed 7 in ACCEPTED"),
    "stop-ignored": ("stop-token-ends-the-request", "'length'"),
    "stop-reason-untold": ("stop-token-ends-the-request", "None"),
    "eos-ignored": ("eos-comes-before-stop-tokens", "'stop' and stop_reason None"),
    "eos-told": ("eos-comes-before-stop-tokens", "'stop' and stop_reason None"),
    "stop-ids-first": ("eos-comes-before-stop-tokens", "'stop' and stop_reason None"),
    "repetition-soon": ("repetition-ends-the-request", "'repetition'"),
    "repetition-early": ("repetition-ends-the-request", "'repetition'"),
    "repetition-misnamed": ("repetition-ends-the-request", "stop_cause"),
    "model-length-plus-one": ("models-length-ends-a-request", "1 tokens, then 'length'"),
    "error-unexplained": ("request-runs-from-accepted-to-one-end", "a message that says why"),
    "length-with-stop-reason": ("request-runs-from-accepted-to-one-end", "'stop' only"),
    "count-of-zero": ("request-runs-from-accepted-to-one-end", "which is listed"),
    "long-ids-returned": ("malformed-messages-are-refused", "too-long-to-return"),
    "abort-ignored": ("abort-ends-a-request", "'abort' length"),
    "abort-answered": ("abort-of-the-unknown-is-ignored", "no such request"),
    "duplicate-accepted": ("duplicate-id-leaves-the-first-untouched", "duplicate_request_id"),
    "duplicate-ends-first": ("duplicate-id-leaves-the-first-untouched", "to run on"),
    "length-plus-one": ("too-long-requests-are-refused", "context_length_exceeded"),
    "token-lost": ("many-requests-interleave", "tokens and finish_reason"),
    "drops-for-slow": ("late-reader-gets-everything", "gave before"),
    "vocabulary-plus-one": ("prompts-end-at-the-vocabulary", "Accepted"),
    "queue-endless": ("queue-limits-are-told-in-time", "overloaded after at most"),
    "retry-untold": ("queue-limits-are-told-in-time", "retry_after_s None"),
    "top-p-zero": ("sampling-beyond-its-ranges-is-refused-by-name", "top_p=0.0"),
    "python-words": ("errors-speak-of-msgpack", "names 'array'"),
    "foreign-words": ("errors-speak-of-msgpack", "without ['bytes']"),
    "unnamed-field": ("sampling-beyond-its-ranges-is-refused-by-name", "'temperature'"),
    "long-ids": ("submits-strings-have-lengths", "request_id of 257"),
    "priority-ignored": ("priority-needs-its-capability", "Accepted"),
    "wrong-nonce": ("ping-gets-its-nonce-back", "nonce 7"),
    "steps-go-back": ("pong-tells-of-the-step-loop", "num_steps of at least"),
    "step-age-when-idle": ("pong-tells-of-the-step-loop", "step_age_ms of 0"),
    "pause-is-shared": ("pause-belongs-to-its-session", "after another session's resume"),
    "pause-outlives-session": ("pause-belongs-to-its-session", "to end with its session"),
    "counters-stand": ("stats-are-told", "generation_tokens"),
    "wrong-call-id": ("pause-keeps-requests-until-resume", "call_id 1"),
    "unknown-operation-done": ("unknown-operations-are-answered", "ok false"),
    "pause-ignored": ("pause-keeps-requests-until-resume", "no tokens while paused"),
    "reset-always": ("prefix-cache-is-reset-when-idle", "ok false"),
    "reset-never": ("prefix-cache-is-reset-when-idle", "no cached tokens"),
    "handles-apart": ("samples-are-requests-with-seeds-of-their-own", "was not accepted"),
    "seeds-same": ("samples-are-requests-with-seeds-of-their-own", "sample 1 of seed 7"),
    "seeds-do-not-wrap": ("samples-are-requests-with-seeds-of-their-own", f"of seed {2**53 - 1}"),
    "handles-ignored": ("samples-are-aborted-one-by-one", "'abort' of sample 0 length"),
    "sample-ends-all": ("samples-are-aborted-one-by-one", "16 tokens"),
    "id-free-early": ("id-is-free-when-all-samples-have-ended", "'duplicate_request_id'"),
    "abort-of-one-sample": ("id-is-free-when-all-samples-have-ended", "'abort' of all samples"),
    "foreign-handles": ("foreign-handles-are-not-aborted", "to run on"),
    "logprobs-endless": ("logprobs-have-a-limit", "ERROR with code 'invalid_request'"),
    "logprobs-rising": ("logprobs-are-of-every-token", "in falling order"),
    "logprobs-one-less": ("logprobs-are-of-every-token", "1 + 1 candidates"),
    "logprobs-untold": ("logprobs-are-of-every-token", "logprobs of the 1 tokens"),
    "own-last": ("logprobs-are-of-every-token", "as first candidate"),
    "rank-from-zero": ("logprobs-are-of-every-token", "a rank of 1 or more 0"),
    "logarithms-of-two": ("logprobs-have-a-limit", "probabilities of 1 together"),
    "logprobs-of-biased": ("logprobs-are-of-the-models-own-logits", "whatever logit_bias is"),
    "prompt-logprobs-late": (
        "prompt-logprobs-are-of-every-token-but-the-first",
        "of 1 tokens before the first token",
    ),
    "prompt-logprobs-from-the-first": (
        "prompt-logprobs-are-of-every-token-but-the-first",
        "of at most 1 tokens",
    ),
    "prompt-logprobs-cached": (
        "prompt-logprobs-are-of-every-token-but-the-first",
        "0 cached tokens",
    ),
    "logprobs-to-all": ("logprobs-are-told-to-those-who-ask", "which asked for none"),
    "empty-logprobs": ("request-runs-from-accepted-to-one-end", "no field prompt_logprobs"),
    "min-tokens-ignored": ("min-tokens-come-before-any-end", "and stop_token_ids"),
    "min-tokens-forget-eos": ("min-tokens-come-before-any-end", "and EOS"),
    "allowed-ignored": ("only-allowed-tokens-are-sampled", "no token but [3]"),
    "bias-last": ("penalties-keep-their-order", "each of"),
    "bad-words-in-prompt": ("bad-words-do-not-come", "without [[3, 1]]"),
    "bad-words-alone": ("bad-words-do-not-come", "without [[1, 1]]"),
    "no-token-is-a-stop": ("bad-words-do-not-come", "no token is left"),
    "prompt-unpenalized": ("penalties-keep-their-order", "the prompt holds the others"),
    "frequency-once": ("penalties-keep-their-order", "with frequency_penalty=2"),
    "presence-ignored": ("penalties-keep-their-order", "with presence_penalty=2"),
    "ids-unchecked": ("parameters-name-tokens-of-the-vocabulary", "invalid_request"),
    "biases-weak": ("biases-choose-and-forbid", "alone"),
    "hidden-size-untold": ("welcome-is-complete", "hidden_size of at least 1"),
    "fingerprint-misspelt": ("welcome-is-complete", "fingerprint of 32 hex digits"),
    "mean-of-the-ends": (EMBEDDINGS, "a mean of about"),
    "embedding-nan": (EMBEDDINGS, "finite numbers"),
    "embedding-short": (EMBEDDINGS, "hidden_size=4"),
    "embedding-lost": (EMBEDDINGS, "an embedding with the 'stop'"),
    "embedding-at-length": (EMBEDDINGS, "an embedding with the 'stop'"),
    "embedding-and-token": (EMBEDDINGS, "no token of a request with pooling"),
    "structured-at-will": ("structured-outputs-need-their-capability", "'invalid_request'"),
    "structured-ignored": ("outputs-are-what-was-wanted", "a text of {'choice'"),
    "structured-misread": ("outputs-are-what-was-wanted", "a text of {'regex': '[ab]{3}'}"),
    "prefixes-ignored": ("free-prefixes-free-what-begins-with-them", "may go on"),
    "prefixes-of-anything": ("free-prefixes-free-what-begins-with-them", "a text of"),
    "structured-eos-anywhere": ("eos-comes-only-where-the-output-can-end", "as a whole ''"),
    "structured-eos-once": ("eos-comes-only-where-the-output-can-end", "then EOS until"),
    "uncompilable-taken": (
        "what-cannot-be-compiled-is-refused-with-its-place",
        "ERROR invalid_request of",
    ),
    "place-untold": (
        "what-cannot-be-compiled-is-refused-with-its-place",
        "says where, of {'json'",
    ),
    "compiles-the-newest-only": (
        "every-request-is-answered-whatever-is-compiled",
        "of each SUBMIT nothing within",
    ),
    "compiling-not-aborted": ("abort-reaches-what-is-compiled", "'abort' of both samples"),
    "plain-overtake": ("every-request-is-answered-whatever-is-compiled", "in the order"),
    "outputs-are-prompt": (RESUMED, "behind 1 tokens"),
    "outputs-forgotten": (RESUMED, "behind 1 tokens"),
    "seed-of-its-own": (RESUMED, "behind 1 tokens"),
    "min-tokens-start-again": ("stop-rules-count-resumed-tokens", "behind 1 tokens"),
    "ended-goes-on": ("outputs-that-have-ended-end-at-once", "no token and ('length', None)"),
    "outputs-unchecked": ("outputs-that-cannot-be-are-refused", "'invalid_request'"),
    "timeout-ignored": ("timeouts-end-requests", "until ['hasty'] have ended"),
    "timeout-is-abort": ("timeouts-end-requests", "'timeout' abort"),
    "timeout-at-once": ("timeouts-end-requests", "with a long timeout_s"),
    "no-guesses": ("mistyped-parameters-are-guessed", "names 'temperature'"),
    "metrics-twice": (METRICS, "a name once"),
    "bucket-missing": (METRICS, "3 counts of seconds"),
    "bounds-mixed": (METRICS, "ascending bounds"),
    "counter-falls": (METRICS, "counters that do not fall"),
    "metrics-stand": (METRICS, "a counter that grows"),
    "after-ignored": (STEPS, "steps above"),
    "newest-first": (STEPS, "in ascending order"),
    "column-short": (STEPS, "columns of one length"),
    "prefill-untold": (STEPS, "num_prefill_tokens"),
    "decode-untold": (STEPS, "at least 4 in num_decode_tokens"),
    "queue-untold": (WAYS, "'queued' as the first"),
    "end-untold": (WAYS, "'ended' as the last"),
    "reason-misread": (WAYS, "its finish_reason"),
    "ways-forgotten": (WAYS, "one way of handle"),
    "clock-stands": (WAYS, "up to now_s"),
    "names-told": ("foreign-requests-have-no-names", "no request_id of another"),
    "wrong-digest": ("files-are-what-the-card-says", "sha256"),
    "offset-ignored": ("files-can-be-read-from-anywhere", "from byte 1 on"),
    "any-file": ("no-other-file-is-served", "'config.json'"),
}
"""Which rule must find which defect of the fake engine, and words of what it must say."""


@pytest.mark.campaign
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_by_its_rule(endpoint: str, defect: str) -> None:
    name, words = DEFECTS[defect]
    with fake_engine(endpoint, defect):
        result = under_test(endpoint, SHORT_PATIENCE_S).run(RULES[name])
    assert result.outcome == "fail"
    assert words in f"{result.expected} {result.got}"


SILENT = "silent-session-ends-without-a-word"
SILENCE_S = 0.5
"""What stands for the protocol's 30 s in the fake engine; its PINGs come every 20 ms."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("", ""),
        ("no-timeout", "the end of a session silent for"),
        ("bye-at-timeout", "nothing but PING"),
    ],
)
def test_the_end_of_a_silent_session_is_seen(endpoint: str, defect: str, words: str) -> None:
    with fake_engine(endpoint, defect, timeout_s=SILENCE_S):
        result = under_test(endpoint, SHORT_PATIENCE_S).run(RULES[SILENT])
    assert result.outcome == ("fail" if defect else "pass"), str(result)
    assert words in f"{result.expected} {result.got}"


DRAIN = "drain-finishes-what-runs"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("", ""),
        ("drain-untold", "DRAINING"),
        ("drain-takes-more", "'draining'"),
        ("drain-aborts", "Bye(reason='drained')"),  # nothing was left to be done
        ("retry-untold", "retry_after_s None"),
    ],
)
def test_a_drain_is_seen(endpoint: str, defect: str, words: str) -> None:
    with fake_engine(endpoint, defect):
        result = under_test(endpoint, SHORT_PATIENCE_S).run(RULES[DRAIN])
    assert result.outcome == ("fail" if defect else "pass"), str(result)
    assert words in f"{result.expected} {result.got}"


@pytest.mark.campaign
def test_our_engine_drains(tiny_model: Path) -> None:
    with engine(tiny_model) as running:
        result = under_test(running.endpoint).run(RULES[DRAIN])
    assert result.outcome == "pass", str(result)


def test_every_rule_finds_a_defect() -> None:
    found = {rule for rule, _ in DEFECTS.values()} | {SILENT, DRAIN}
    # What these find is a session that does not open, or an engine without a range's end.
    unseen = RULES.keys() - found
    assert unseen == {"every-hello-is-answered", "sampling-ranges-include-their-ends"}
