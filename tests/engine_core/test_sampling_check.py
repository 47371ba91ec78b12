"""What admission refuses of sampling parameters, by this model and engine; each with its words."""

from __future__ import annotations

import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.admission import MAX_HANDLE
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    InvalidRequestError,
)
from tests.engine_core.test_admission import admission, submit

EOS = [3, 4]


def build(max_tokens: int | None = 8, max_logprobs: int = 20, **sampling: object) -> Request:
    config = EngineConfig(max_logprobs=max_logprobs)
    return admission(config=config).build(submit(4, max_tokens, **sampling), handle=1, client=1)


@pytest.mark.parametrize("token_id", [-1, 50, 2**31, -(2**63), 2**64 - 1])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (r"stop_token_ids\[1\]", "stop_token_ids"),
        (r"allowed_token_ids\[1\]", "allowed_token_ids"),
        (r"logit_bias\[1\]", "logit_bias"),
        (r"bad_words_token_ids\[2\]\[1\]", "bad_words_token_ids"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_where_it_is(
    place: str, name: str, token_id: int
) -> None:
    def value(last: int) -> object:
        if name == "logit_bias":
            return [(0, 1.0), (last, -1.0)]
        return [[0], [49, 0], [0, last]] if name == "bad_words_token_ids" else [0, last]

    build(**{name: value(49)})
    with pytest.raises(InvalidRequestError, match=f"{place}={token_id} is not a token.*0 to 49"):
        build(**{name: value(token_id)})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("asked", "limit", "message"),
    [
        (20, 20, None),
        (21, 20, "=21 is out of range: this engine gives at most 20.*--max-logprobs"),
        (0, 0, None),
        (1, 0, "at most 0;"),
        (-1, 20, "=-1, all 50 tokens of the vocabulary, is .* at most 20.*--max-logprobs"),
        (-1, 49, "at most 49"),
        (-1, 50, None),
        (-1, -1, None),
        (50, -1, None),
        (51, -1, "=51 is out of range: the vocabulary has 50 tokens; -1 is for all"),
        (51, 100, "the vocabulary has 50 tokens"),
    ],
)
def test_log_probabilities_are_held_to_the_engines_limit(
    name: str, asked: int, limit: int, message: str | None
) -> None:
    if message is None:
        expected = 50 if (name, asked) == ("prompt_logprobs", -1) else asked
        assert getattr(build(max_logprobs=limit, **{name: asked}).sampling, name) == expected
        return
    with pytest.raises(InvalidRequestError, match=f"^{name}.*{message.lstrip('=')}"):
        build(max_logprobs=limit, **{name: asked})


@pytest.mark.parametrize(
    ("sampling", "is_allowed"),
    [
        ({"allowed_token_ids": EOS}, True),
        ({"allowed_token_ids": EOS, "min_tokens": 1}, False),
        ({"allowed_token_ids": [*EOS, 9], "min_tokens": 1, "stop_token_ids": [9]}, False),
        ({"allowed_token_ids": [*EOS, 9], "min_tokens": 1}, True),
        ({"allowed_token_ids": EOS, "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": [7, 7, 8], "bad_words_token_ids": [[7], [8]]}, False),
        ({"allowed_token_ids": [7, 8], "bad_words_token_ids": [[7], [8, 7]]}, True),
        ({"allowed_token_ids": [3, 8], "min_tokens": 1, "bad_words_token_ids": [[8]]}, False),
        ({"bad_words_token_ids": [[i] for i in range(50)]}, False),
        ({"bad_words_token_ids": [[i] for i in range(49)]}, True),
        ({"bad_words_token_ids": [[i] for i in range(50) if i not in EOS]}, True),
        ({"bad_words_token_ids": [[i] for i in range(50) if i not in EOS], "min_tokens": 1}, False),
    ],
)
def test_what_leaves_no_token_to_choose_is_refused(
    sampling: dict[str, object], is_allowed: bool
) -> None:
    if is_allowed:
        build(**sampling)
        return
    with pytest.raises(InvalidRequestError, match="no token is left to choose: each of"):
        build(**sampling)


@pytest.mark.parametrize("min_tokens", [60, 61])
def test_min_tokens_must_fit_the_models_length(min_tokens: int) -> None:
    if min_tokens == 60:
        assert build(None, min_tokens=60).max_num_tokens == 64
        return
    with pytest.raises(
        ContextLengthError, match=r"4 tokens and min_tokens is 61.*max_model_len=64"
    ):
        build(None, min_tokens=min_tokens)


def test_an_empty_prompt_is_called_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"^the prompt is empty: prompt_token_ids has 0"):
        admission().build(submit(0, 4), handle=1, client=1)


def test_samples_count_as_requests_and_their_prompt_once() -> None:
    counters = SchedulerCounters()
    limited = admission(queue_limit=QueueLimit(5, 10, counters))
    request = limited.build(submit(6, 4, n=3), handle=1, client=1)
    assert [one.handle for one in request.samples] == [1, 2, 3]
    with pytest.raises(EngineOverloadedError, match=r"3 requests wait, and at most 5.*3 samples"):
        limited.build(submit(1, 4, n=3), handle=4, client=1)
    limited.build(submit(4, 4, n=2), handle=4, client=1)  # nothing of the one before was counted
    counters.dequeued_reqs, counters.dequeued_tokens = 5, 10
    limited.build(submit(30, 4, n=128), handle=6, client=1)  # one may always wait


def test_handles_do_not_go_beyond_what_the_wire_has_for_them() -> None:
    last = admission().build(submit(4, 4, n=2), handle=MAX_HANDLE - 1, client=1)
    assert last.samples[-1].handle == 2**32 - 1
    with pytest.raises(EngineOverloadedError, match="handles end at 4294967295"):
        admission().build(submit(4, 4, n=3), handle=MAX_HANDLE - 1, client=1)
