"""Admission's limits, at their edges."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.grammars.grammar_compiler import GrammarSource, NoGrammars
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    InvalidRequestError,
)
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import DefaultSampling, EngineSamplingParams

MAX_MODEL_LEN = 64


def admission(
    num_blocks: int = 16,
    config: EngineConfig = EngineConfig(),  # noqa: B008 - immutable
    queue_limit: QueueLimit | None = None,
    default_sampling: DefaultSampling = DefaultSampling(),  # noqa: B008 - immutable
    grammars: GrammarSource = NoGrammars("no vocabulary"),  # noqa: B008 - immutable
) -> Admission:
    card = ModelCard(
        model="fake",
        architecture="Fake",
        dtype="float32",
        vocab_size=50,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[3, 4],
        block_size=4,
        num_blocks=num_blocks,
        default_sampling=default_sampling,
    )
    limit = queue_limit or QueueLimit(100, 10_000, SchedulerCounters())
    return Admission(card, config, limit, grammars)


def submit(num_prompt: int, max_tokens: int | None, **sampling: object) -> Submit:
    params = EngineSamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    prompt = np.arange(num_prompt, dtype="<i4") % 50
    return Submit(request_id="r", prompt_token_ids=prompt.tobytes(), sampling=params)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(63, 1), (1, 63), (32, 32), (63, None)])
def test_prompt_and_output_may_fill_the_models_length(
    num_prompt: int, max_tokens: int | None
) -> None:
    request = admission().build(submit(num_prompt, max_tokens), handle=1, client=1)
    assert request.max_num_tokens == MAX_MODEL_LEN
    assert len(request.key_chain.keys) == num_prompt // 4


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(65, 1), (1, 64), (32, 33), (64, None)])
def test_one_token_more_is_refused(num_prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError, match=f"{num_prompt} tokens?.*max_model_len=64"):
        admission().build(submit(num_prompt, max_tokens), handle=1, client=1)


def test_a_prompt_of_the_models_length_may_have_the_one_token_that_is_never_computed() -> None:
    resumed = msgspec.structs.replace(submit(64, 1), output_token_ids=pack_int32([1]))
    for body in (submit(64, 1), submit(64, 1, prompt_logprobs=0), resumed):
        assert admission().build(body, handle=1, client=1).max_num_tokens == 65
    more = msgspec.structs.replace(submit(65, 1), output_token_ids=pack_int32([1]))
    with pytest.raises(ContextLengthError, match=r"65 tokens and output_token_ids 1, .*len=64"):
        admission().build(more, handle=1, client=1)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_an_embedding_may_be_of_all_that_the_model_and_the_cache_hold(
    max_tokens: int | None,
) -> None:
    build = admission(num_blocks=5).build  # 20 tokens
    request = build(submit(20, max_tokens, pooling="mean"), handle=1, client=1)
    assert request.max_num_tokens == 21
    with pytest.raises(ContextLengthError, match=r"22 tokens .*holds 20"):
        build(submit(21, max_tokens, pooling="mean"), handle=2, client=1)
    build = admission().build
    assert build(submit(64, max_tokens, pooling="last"), handle=2, client=1).max_num_tokens == 65
    with pytest.raises(ContextLengthError, match=r"65 tokens and pooling is 'last'.*len=64"):
        build(submit(65, max_tokens, pooling="last"), handle=2, client=1)


def test_what_could_never_fit_an_empty_pool_is_refused() -> None:
    small = admission(num_blocks=5)  # 20 tokens; the 21st needs no KV
    assert small.build(submit(10, 11), handle=1, client=1).max_num_tokens == 21
    with pytest.raises(ContextLengthError, match=r"22 tokens.*holds 20.*--kv-cache-memory-bytes"):
        small.build(submit(10, 12), handle=1, client=1)


def test_a_request_without_sampling_parameters_gets_the_models() -> None:
    defaults = DefaultSampling(temperature=0.6, top_k=20)
    build = admission(default_sampling=defaults).build
    bare = Submit(request_id="r", prompt_token_ids=np.zeros(3, "<i4").tobytes())
    assert build(bare, 1, 1).sampling == defaults
    assert build(submit(3, 5), 1, 1).sampling == EngineSamplingParams(max_tokens=5)


def test_eos_ids_are_the_models_unless_ignored() -> None:
    build = admission().build
    assert build(submit(1, 1), 1, 1).eos_token_ids == (3, 4)
    assert build(submit(1, 1, ignore_eos=True), 1, 1).eos_token_ids == ()


def test_priorities_need_the_priority_policy() -> None:
    urgent = msgspec.structs.replace(submit(4, 4), priority=-5)
    with pytest.raises(InvalidRequestError, match="--scheduling-policy priority"):
        admission().build(urgent, handle=1, client=1)
    by_priority = admission(config=EngineConfig(scheduling_policy="priority"))
    assert by_priority.build(urgent, handle=1, client=1).priority == -5
    absurd = msgspec.structs.replace(urgent, priority=2**31)
    with pytest.raises(InvalidRequestError, match="out of range"):
        by_priority.build(absurd, handle=2, client=1)


def test_a_full_queue_refuses_with_the_numbers_and_when_to_try_again() -> None:
    counters = SchedulerCounters()
    limited = admission(queue_limit=QueueLimit(2, 1000, counters))
    for handle in (1, 2):
        limited.build(submit(4, 4), handle=handle, client=1)
    with pytest.raises(EngineOverloadedError, match="2 requests wait") as caught:
        limited.build(submit(4, 4), handle=3, client=1)
    assert caught.value.retry_after_s > 0
    counters.dequeued_reqs += 1
    limited.build(submit(4, 4), handle=4, client=1)


def test_sessions_share_prefixes_unless_the_engine_salts_by_session() -> None:
    def keys(config: EngineConfig, client: int, salt: str | None = None) -> object:
        request = (
            submit(8, 4) if salt is None else msgspec.structs.replace(submit(8, 4), cache_salt=salt)
        )
        return admission(config=config).build(request, handle=1, client=client).key_chain.keys

    shared, salted = EngineConfig(), EngineConfig(salt_prefix_cache_by_session=True)
    assert keys(shared, 1) == keys(shared, 2)
    assert keys(salted, 1) == keys(salted, 1)
    assert len({str(keys(salted, 1)), str(keys(salted, 2)), str(keys(shared, 1))}) == 3
    assert keys(salted, 1) != keys(shared, 1, salt="1")


def test_without_prefix_caching_no_keys_are_computed() -> None:
    config = EngineConfig(enable_prefix_caching=False)
    assert admission(config=config).build(submit(8, 4), handle=1, client=1).key_chain.keys == []


@pytest.mark.parametrize("token_id", [-1, 50, -(2**31), 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused_wherever_they_are(token_id: int) -> None:
    prompt = msgspec.structs.replace(
        submit(4, 4), prompt_token_ids=np.array([0, 49, token_id], "<i4").tobytes()
    )
    with pytest.raises(InvalidRequestError, match=rf"prompt_token_ids\[2\]={token_id}.*0 to 49"):
        admission().build(prompt, handle=1, client=1)
    stops = submit(4, 4, stop_token_ids=[0, 49, token_id])
    with pytest.raises(InvalidRequestError, match=rf"stop_token_ids\[2\]={token_id}.*0 to 49"):
        admission().build(stops, handle=1, client=1)


@pytest.mark.parametrize(("column", "hint"), [(b"\1\0\0\0\2\0\0", "7 bytes"), (b"", "0 bytes")])
def test_a_prompt_that_is_no_column_is_told_what_one_is(column: bytes, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{hint}.*int32.*little-endian, of 4 bytes"):
        admission().build(Submit(request_id="r", prompt_token_ids=column), handle=1, client=1)


@pytest.mark.parametrize(
    ("prompt", "hinted"), [([1, 2, 49], True), ([1, 2, 50], False), ([50 << 24], False)]
)
def test_a_big_endian_prompt_is_recognized(prompt: list[int], hinted: bool) -> None:
    big_endian = Submit(request_id="r", prompt_token_ids=np.array(prompt, ">i4").tobytes())
    with pytest.raises(InvalidRequestError, match="not a token id of this model") as caught:
        admission().build(big_endian, handle=1, client=1)
    assert ("big-endian" in str(caught.value)) is hinted


@pytest.mark.parametrize("num_blocks", [16, 5])
def test_a_request_without_max_tokens_is_refused_in_words_of_any_language(num_blocks: int) -> None:
    num_prompt = 64 if num_blocks == 16 else 1  # the model, or else the cache, is too small
    with pytest.raises(ContextLengthError, match="max_tokens is absent") as caught:
        admission(num_blocks).build(submit(num_prompt, None), handle=1, client=1)
    assert "None" not in str(caught.value)
