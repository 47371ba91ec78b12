"""Embeddings and scoring in the SDK: what is asked, and what the engine's numbers mean."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from msgspec.structs import replace
from tokenizers import processors

from nanocore.client import (
    InvalidRequestError,
    NanocoreError,
    ProtocolError,
    SamplingParams,
    ScoreOutput,
)
from nanocore.client.connection.remote_files import RemoteFiles
from nanocore.client.connection.tokenizer_loader import TokenizerLoader
from nanocore.client.requests.request_outputs import EmbeddingOutput
from nanocore.client.requests.scoring import ScoreRequest, score_request
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Abort, Error, Event, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from tests.client.byte_tokens import END, ids_of
from tests.client.fake_engine import FakeEngine, connected, served, welcome_message
from tests.client.logprob_columns import logprobs_of
from tests.client.running import run
from tests.client.trained_tokenizers import TRAINED
from tests.protocol.samples import MODEL_CARD
from tests.tiny_models import VOCAB_SIZE, write_byte_tokenizer

ABLE = replace(welcome_message(), capabilities=["embeddings"])


def end(handle: int, *numbers: float, cached: int = 0) -> Event:
    embedding = array("f", numbers).tobytes()
    return Event(handle=handle, num_cached_tokens=cached, finish_reason="stop", embedding=embedding)


def norm(embedding: array[float]) -> float:
    return math.sqrt(sum(number * number for number in embedding))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("normalize", "numbers", "expected"),
    [
        (True, (3.0, -4.0), [0.6, -0.8]),
        (False, (3.0, -4.0), [3.0, -4.0]),
        (True, (0.0, 0.0), [0.0, 0.0]),
        (True, (3e38, -3e38), [math.sqrt(0.5), -math.sqrt(0.5)]),
        (True, (1e-40, 0.0), [1.0, 0.0]),
    ],
)
async def test_a_prompts_embedding_has_length_1_unless_it_is_not_wanted_so(
    endpoint: str, pooling: Any, normalize: bool, numbers: tuple[float, ...], expected: list[float]
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        call = client.embed([1, 2, 3], pooling, normalize, "mine", 2, "salt")
        request = asyncio.create_task(call)
        submit = await engine.accept()
        assert submit.sampling == EngineSamplingParams(pooling=pooling)
        said = submit.request_id, submit.priority, submit.cache_salt
        assert said == ("mine", 2, "salt")
        engine.output({}, end(1, *numbers, cached=2))
        output = await request
        assert isinstance(output, EmbeddingOutput)
        assert output.embedding == pytest.approx(array("f", expected), rel=1e-6)
        assert (output.request_id, output.num_cached_tokens) == ("mine", 2)
        assert output.prompt_token_ids == [1, 2, 3]


async def test_a_text_is_tokenized_as_others_are(endpoint: str, tokenizer_folder: Any) -> None:
    async with connected(endpoint, ABLE, tokenizer=tokenizer_folder) as (engine, client):
        request = asyncio.create_task(client.embed("abc"))
        submit = await engine.accept()
        assert submit.sampling == EngineSamplingParams(pooling="last")
        engine.output({}, end(1, 1.0))
        output = await request
        expected = (await client.get_tokenizer()).encode("abc")
        assert [*output.prompt_token_ids] == [*expected]


@pytest.mark.parametrize("pooling", ["cls", "", None, 1])
async def test_a_pooling_that_there_is_not_is_refused_at_once(endpoint: str, pooling: Any) -> None:
    async with connected(endpoint, ABLE) as (_, client):
        with pytest.raises(InvalidRequestError, match=r"^pooling(=| must be a string, not )"):
            await client.embed([1], pooling)


def test_an_engine_before_1_7_or_without_the_capability_is_not_asked(endpoint: str) -> None:
    async def scenario(welcome: Any, words: str) -> None:
        async with connected(endpoint, welcome) as (_, client):
            with pytest.raises(InvalidRequestError, match=words):
                await client.embed([1])

    run(scenario(replace(ABLE, protocol=(1, 6)), "pooling came with protocol 1.7"))
    run(scenario(replace(ABLE, capabilities=["priority"]), "does not compute embeddings"))


@pytest.mark.parametrize(
    ("reason", "message"), [("abort", None), ("abort", "SIGTERM"), ("error", "it is NaN")]
)
async def test_a_request_that_ends_without_one_says_why(
    endpoint: str, reason: Any, message: str | None
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = await engine.begin(client.embed([1], request_id="mine"))
        engine.output({}, Event(handle=1, finish_reason=reason, message=message))
        with pytest.raises(NanocoreError, match=f"'mine' .* ended with '{reason}'") as caught:
            await request
        assert message is None or message in str(caught.value)


@pytest.mark.parametrize("embedding", [None, b"", b"\0\0\0"])
async def test_a_stop_without_whole_numbers_breaks_the_protocol(
    endpoint: str, embedding: bytes | None
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = await engine.begin(client.embed([1]))
        engine.output({}, Event(handle=1, finish_reason="stop", embedding=embedding))
        with pytest.raises(ProtocolError, match=r"embedding of \d bytes"):
            await request


@pytest.mark.parametrize("numbers", [(1.0, 2.0), (1.0, math.nan, 2.0), (math.inf, 0.0, 0.0)])
async def test_numbers_that_the_model_cannot_have_break_the_protocol(
    endpoint: str, numbers: tuple[float, ...]
) -> None:
    welcome = replace(ABLE, model=replace(ABLE.model, hidden_size=3))

    async with connected(endpoint, welcome) as (engine, client):
        embedding = await engine.begin(client.embed([1]))
        engine.output({}, end(1, *numbers))
        with pytest.raises(ProtocolError, match="hidden_size"):
            await embedding


async def test_who_goes_away_aborts(endpoint: str) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = await engine.begin(client.embed([1], request_id="mine"))
        request.cancel()
        assert (await engine.receive(Abort)).request_ids == ["mine"]


async def test_others_take_no_notice_of_one_that_they_did_not_ask_for(endpoint: str) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = await engine.begin(client.complete([1], SamplingParams(detokenize=False)))
        engine.output({1: [5]}, end(1, 1.0))
        output = await request
        assert output.embedding is None
        assert output.outputs[0].token_ids == [5]


async def test_encode_gives_them_in_the_order_of_the_prompts_and_tries_again(joining: str) -> None:
    async with served(joining, ABLE) as (engine, llm):
        call = asyncio.create_task(
            asyncio.to_thread(llm.encode, [[1], [2]], pooling="mean", use_tqdm=False)
        )
        first = await engine.receive(Submit)
        busy = Error(
            code="overloaded", message="wait", request_id=first.request_id, retry_after_s=0.001
        )
        engine.send(busy)
        handles: dict[int, int] = {}
        for handle in (1, 2):
            submit = await engine.accept(handle)
            assert submit.sampling == EngineSamplingParams(pooling="mean")
            handles[submit.prompt_token_ids[0]] = handle
        for prompt in (2, 1):
            engine.output({}, end(handles[prompt], float(prompt), 0.0))
        outputs = await call
        assert [output.prompt_token_ids for output in outputs] == [[1], [2]]
        assert [norm(output.embedding) for output in outputs] == [1.0, 1.0]


async def test_encode_of_one_prompt_and_unnormalized(joining: str) -> None:
    async with served(joining, ABLE) as (engine, llm):
        call = asyncio.create_task(asyncio.to_thread(llm.encode, [7, 8], normalize=False))
        assert (await engine.accept()).sampling == EngineSamplingParams(pooling="last")
        engine.output({}, end(1, 3.0, 4.0))
        (output,) = await call
        assert [*output.embedding] == [3.0, 4.0]


async def test_what_encode_cannot_ask_is_refused(joining: str) -> None:
    async with served(joining, ABLE) as (_, llm):
        with pytest.raises(InvalidRequestError, match="pooling='max' is unknown"):
            await asyncio.to_thread(llm.encode, [[1]], pooling="max")
        assert await asyncio.to_thread(llm.encode, []) == []


NO_FILES: Any = None
BOS = 300


def joined(folder: Path, context: Any, continuation: Any) -> ScoreRequest:
    files: RemoteFiles = NO_FILES

    async def scenario() -> ScoreRequest:
        loader = TokenizerLoader(folder, files, MODEL_CARD)
        return await score_request(loader, context, continuation, VOCAB_SIZE)

    return run(scenario())


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merging")
    TRAINED["byte-level gpt-2"]().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("template", ["$A <|end|>", "<filler300> $A <|end|>", "<filler300> $A"])
def test_what_a_tokenizer_puts_behind_a_text_is_not_scored(tmp_path: Path, template: str) -> None:
    write_byte_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = ("<filler300>", "<|end|>")
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, backend.token_to_id(name)) for name in names]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    first = [BOS] if "<filler300>" in template else []
    tokenizer = Tokenizer.from_folder(tmp_path)
    request = joined(tmp_path, "ab", "cd")
    assert request.context_ids == [*first, *ids_of(tokenizer, "ab")]
    assert request.continuation_ids == ids_of(tokenizer, "cd")
    empty = joined(tmp_path, "", "cd")
    assert empty.context_ids == (first or [END])
    assert empty.continuation_ids == ids_of(tokenizer, "cd")


def test_token_ids_may_be_of_any_integers(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    request = joined(tmp_path, np.array([5, 6]).tolist(), [np.int64(7), np.int32(8)])
    assert request.continuation_ids == [7, 8]
    assert {type(token_id) for token_id in request.continuation_ids} == {int}


@pytest.mark.parametrize(
    ("context", "continuation", "text"),
    [
        ("The quick", " brown fox", " brown fox"),
        ("The quick ", "brown fox", " brown fox"),
        ("The quick \n\t ", "brown", " \n\t brown"),
        ("The", "n", "n"),
        ("don", "'t jump", "'t jump"),
    ],
)
def test_texts_are_tokenized_together_and_the_contexts_last_spaces_are_the_continuations(
    merging: Path, context: str, continuation: str, text: str
) -> None:
    tokenizer = Tokenizer.from_folder(merging)
    request = joined(merging, context, continuation)
    assert request.context_ids == tokenizer.encode(context.rstrip())
    together = request.context_ids + request.continuation_ids
    assert together == tokenizer.encode(context + continuation)
    assert tokenizer.decode(request.continuation_ids) == text


def test_a_continuation_that_changes_the_contexts_last_token_is_what_comes_after_as_many(
    merging: Path,
) -> None:
    """So lm-evaluation-harness has it; who wants something else gives token ids."""
    tokenizer = Tokenizer.from_folder(merging)
    whole, context = tokenizer.encode("quick"), tokenizer.encode("q")
    assert whole[: len(context)] != context, "else this shows nothing"
    request = joined(merging, "q", "uick")
    assert (request.context_ids, request.continuation_ids) == (context, whole[len(context) :])


@pytest.mark.parametrize(
    "ids", [[5, 6], array("i", [5, 6]), {"prompt_token_ids": [5, 6]}], ids=repr
)
def test_token_ids_are_taken_as_they_are(tokenizer_folder: Path, ids: Any) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    request = joined(tokenizer_folder, ids, ids)
    assert (request.context_ids, request.continuation_ids) == ([5, 6], [5, 6])
    assert joined(tokenizer_folder, "a ", ids).context_ids == ids_of(tokenizer, "a ")
    assert joined(tokenizer_folder, ids, " a").continuation_ids == ids_of(tokenizer, " a")


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ({"bos_token": "<filler300>", "eos_token": "<|end|>"}, BOS),
        ({"bos_token": None, "eos_token": "<|end|>"}, END),
        ({}, None),
    ],
)
@pytest.mark.parametrize("context", ["", " \n"])
def test_an_empty_text_is_the_models_bos_or_else_its_eos(
    tmp_path: Path, names: dict[str, str], first: int | None, context: str
) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    if first is None:
        with pytest.raises(InvalidRequestError, match="the context is empty"):
            joined(tmp_path, context, "a")
    else:
        request = joined(tmp_path, context, "a")
        assert request.context_ids == [first]
        assert request.continuation_ids == ids_of(Tokenizer.from_folder(tmp_path), context + "a")


@pytest.mark.parametrize(
    ("context", "continuation", "message"),
    [
        ([], [5], "the context is empty"),
        ([], "a", "the context is empty"),
        ([5], [], "the continuation has no tokens"),
        ("a", "", "the continuation has no tokens"),
        ("a ", "", "the continuation has no tokens"),
        (7, [5], "a prompt is a str.*not int"),
        ([5], None, "a prompt is a str.*not NoneType"),
        ([5], [VOCAB_SIZE], f"last token, {VOCAB_SIZE}, is not a token id.*0 to {VOCAB_SIZE - 1}"),
        ([5], [-1], "last token, -1, is not a token id"),
        ([5], [5, "x"], "the token ids of the continuation: 'str'"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tokenizer_folder: Path, context: Any, continuation: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        joined(tokenizer_folder, context, continuation)


def test_text_that_is_no_token_of_its_own_is_refused(merging: Path) -> None:
    tokenizer = Tokenizer.from_folder(merging)
    assert len(tokenizer.encode("sa")) > len(tokenizer.encode("sai")), "else this shows nothing"
    with pytest.raises(InvalidRequestError, match="merges with the context's last token"):
        joined(merging, "sa", "i")


# -- the request, and what is made of its answer --------------------------------------------------


async def answer(engine: FakeEngine, handle: int, *told: tuple[float, int]) -> Submit:
    """Accept a request, and say (logprob, rank) of its prompt's tokens and of the one sampled."""
    submit = await engine.accept(handle)
    *before, (logprob, rank) = told
    assert submit.sampling is not None
    (last,) = submit.sampling.allowed_token_ids or ()
    ids = unpack_int32(submit.prompt_token_ids)[1:]
    prompt = [(handle, r, [(i, p)]) for i, (p, r) in zip(ids, before, strict=False)]
    engine.output(
        {handle: [last]},
        Event(handle=handle, finish_reason="length", num_cached_tokens=0 if before else 1),
        logprobs=logprobs_of((handle, rank, [(last, logprob)])),
        prompt_logprobs=logprobs_of(*prompt) if before else None,
    )
    return submit


@pytest.mark.parametrize(
    ("ranks", "is_greedy"), [((9, 1, 1), True), ((9, 1, 2), False), ((9, 2, 1), False)]
)
async def test_a_score_is_that_of_the_continuations_tokens_alone(
    endpoint: str, ranks: tuple[int, ...], is_greedy: bool
) -> None:
    async with connected(endpoint) as (engine, client):
        scoring = asyncio.create_task(client.score([1, 2], [3, 4], "name", cache_salt="salt"))
        submit = await answer(engine, 1, *zip((-7.0, -0.5, -0.25), ranks, strict=True))
        assert unpack_int32(submit.prompt_token_ids).tolist() == [1, 2, 3]
        assert (submit.request_id, submit.cache_salt) == ("name", "salt")
        sampling = submit.sampling
        assert sampling is not None
        assert (sampling.max_tokens, sampling.prompt_logprobs, sampling.logprobs) == (1, 0, 0)
        score = await scoring
        assert score == ScoreOutput("name", [3, 4], [-0.5, -0.25], is_greedy, 0)
        assert (score.logprob, score.num_tokens) == (-0.75, 2)


async def test_one_token_needs_no_log_probabilities_of_its_prompt(endpoint: str) -> None:
    """So that the prefix cache may have it."""

    async with connected(endpoint) as (engine, client):
        scoring = asyncio.create_task(client.score([1, 2], [3]))
        submit = await answer(engine, 1, (-0.5, 1))
        assert submit.sampling is not None
        assert submit.sampling.prompt_logprobs is None
        score = await scoring
        assert (score.token_logprobs, score.num_cached_tokens) == ([-0.5], 1)


async def test_a_request_that_ends_without_a_score_says_why(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        scoring = await engine.begin(client.score([1, 2], [3]))
        engine.output({}, Event(handle=1, finish_reason="abort", message="it is draining"))
        with pytest.raises(NanocoreError, match="ended with abort: it is draining"):
            await scoring


async def test_scores_come_in_the_order_of_the_pairs_and_busy_engines_are_asked_again(
    joining: str,
) -> None:
    async with served(joining) as (engine, llm):
        pairs = [([1], [5]), ([2], [6]), ([3], [7])]
        scoring = asyncio.create_task(asyncio.to_thread(llm.score, pairs, use_tqdm=False))
        refused = await engine.receive(Submit)
        busy = Error(
            code="overloaded", message="full", request_id=refused.request_id, retry_after_s=0.01
        )
        engine.send(busy)
        for handle in (1, 2, 3):
            await answer(engine, handle, (-float(handle), 1))
        scores = await scoring
        assert [score.token_ids for score in scores] == [[5], [6], [7]]
        assert sorted(score.logprob for score in scores) == [-3.0, -2.0, -1.0]


@pytest.mark.parametrize("pairs", [None, "ab", [1], ["abc"], [([1],)], [([1], [2], [3])]], ids=repr)
async def test_what_are_no_pairs_is_refused(joining: str, pairs: Any) -> None:
    async with served(joining) as (_, llm):
        with pytest.raises(InvalidRequestError, match="pairs are a list of"):
            await asyncio.to_thread(llm.score, pairs, use_tqdm=False)
