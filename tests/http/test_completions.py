"""/v1/completions with the demo model, as OpenAI's own client and evaluation harnesses call it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx
import openai
import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from tests.client.running import run
from tests.end_to_end import forked
from tests.end_to_end.test_compile_process import DEMO_MODEL as DEMO
from tests.http.asgi import app_of, ask, openai_client

PROMPT = "<|im_start|>user\nWhat is 12 + 13?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "12 + 13 = 25"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 20}


def with_client(endpoint: str, calls: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """What these calls give."""

    async def call() -> Any:
        async with app_of(endpoint, served_model_names=("demo",)) as (_, http):
            return await calls(openai_client(http))

    return run(call())


def post(endpoint: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return ask(endpoint, path, body)


async def token_ids_of(endpoint: str, *texts: str) -> list[list[int]]:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        return [await client.encode(text) for text in texts]


def test_openais_client_gets_text_whole_and_streamed(demo_endpoint: str) -> None:
    async def calls(client: openai.AsyncOpenAI) -> Any:
        whole = await client.completions.create(prompt=PROMPT, **GREEDY)
        stream = await client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(demo_endpoint, calls)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (ANSWER, "stop")
    assert whole.model == "demo"
    assert whole.id.startswith("cmpl-")
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == 18


def test_a_batch_is_answered_as_its_prompts_alone(demo_endpoint: str) -> None:
    questions = [PROMPT.replace("13", str(number)) for number in (13, 25, 38)]

    async def calls(client: openai.AsyncOpenAI) -> Any:
        as_text = await client.completions.create(prompt=questions, n=2, **GREEDY)
        ids = await token_ids_of(demo_endpoint, *questions)
        as_ids = await client.completions.create(prompt=ids, **GREEDY)
        streamed: dict[int, str] = {}
        async for chunk in await client.completions.create(prompt=ids, stream=True, **GREEDY):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + choice.text
        alone = [await client.completions.create(prompt=q, **GREEDY) for q in questions]
        return as_text, as_ids, streamed, [one.choices[0].text for one in alone]

    as_text, as_ids, streamed, alone = with_client(demo_endpoint, calls)
    assert alone[0] == ANSWER
    assert [choice.index for choice in as_text.choices] == [*range(6)]
    assert [choice.text for choice in as_text.choices] == [t for t in alone for _ in range(2)]
    assert [choice.text for choice in as_ids.choices] == alone
    assert [streamed[index] for index in range(3)] == alone
    assert as_ids.usage.prompt_tokens * 2 == as_text.usage.prompt_tokens * 2 == 2 * 3 * 18


def test_a_prompt_of_the_models_length_leaves_room_for_one_token(demo_endpoint: str) -> None:
    async def calls(client: openai.AsyncOpenAI) -> Any:
        async with AsyncEngineClient.connect(demo_endpoint, timeout_s=60) as direct:
            prompt = [5] * direct.model_card.max_model_len
        return await client.completions.create(model="demo", prompt=prompt, max_tokens=9)

    assert with_client(demo_endpoint, calls).usage.completion_tokens == 1


def test_a_prompt_of_the_models_length_can_be_scored(demo_endpoint: str) -> None:
    """With echo, as harnesses do it, and by the client itself; nothing of it is cut off."""

    async def calls(client: openai.AsyncOpenAI) -> Any:
        async with AsyncEngineClient.connect(demo_endpoint, timeout_s=60) as direct:
            length = direct.model_card.max_model_len
            score = await direct.score([5], [6] * (length - 1))
        asked = {"model": "demo", "max_tokens": 0, "logprobs": 0, "echo": True}
        whole = await client.completions.create(prompt=[5] + [6] * (length - 1), **asked)
        cut = await client.completions.create(
            prompt=[7, 5] + [6] * (length - 1), extra_body={"truncate_prompt_tokens": -1}, **asked
        )
        return score, whole.choices[0].logprobs, cut.choices[0].logprobs

    score, whole, cut = with_client(demo_endpoint, calls)
    assert whole.token_logprobs[1:] == cut.token_logprobs[1:] == score.token_logprobs


def test_harnesses_read_a_prompts_own_logprobs(demo_endpoint: str) -> None:
    """As lm-evaluation-harness does: of its continuation's tokens, not of the one that is made."""

    async def calls(client: openai.AsyncOpenAI) -> Any:
        (context, both) = await token_ids_of(demo_endpoint, PROMPT, PROMPT + ANSWER)
        answer = await client.completions.create(
            model="demo", prompt=[both], temperature=0, max_tokens=1, logprobs=1, seed=1234,
            echo=True,
        )  # fmt: skip
        async with AsyncEngineClient.connect(demo_endpoint, timeout_s=60) as direct:
            score = await direct.score(context, both[len(context) :])
        return len(context), answer.choices[0], score

    num_context, choice, score = with_client(demo_endpoint, calls)
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[num_context:-1] == score.token_logprobs
    tops = [max(top.values()) for top in logprobs.top_logprobs[num_context:-1]]
    assert tops == score.token_logprobs  # each is the likeliest
    assert choice.text.startswith(PROMPT + ANSWER)
    tickets = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(
        choice.text[offset : offset + len(token)] == token for offset, token in list(tickets)[:-1]
    )


def test_no_tokens_are_made_where_only_the_echo_is_wanted(demo_endpoint: str) -> None:
    asked = {"prompt": ["a", "b c"], "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = post(demo_endpoint, asked).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b c"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [1, 3]
    assert answer["usage"]["completion_tokens"] == 0


def test_the_end_of_a_prompt_is_kept(demo_endpoint: str) -> None:
    asked = {"prompt": "x" * 5000 + PROMPT, "truncate_prompt_tokens": 18, "temperature": 0}
    answer = post(demo_endpoint, asked | {"echo": True}).json()
    assert answer["choices"][0]["text"] == PROMPT + ANSWER
    assert answer["usage"]["prompt_tokens"] == 18
    whole = post(demo_endpoint, asked | {"truncate_prompt_tokens": -1, "max_tokens": 3}).json()
    assert whole["usage"]["prompt_tokens"] == 2048 - 3


def test_prompt_logprobs_are_those_of_the_engine(demo_endpoint: str) -> None:
    async def direct() -> Any:
        async with AsyncEngineClient.connect(demo_endpoint, timeout_s=60) as client:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
            return (await client.complete(PROMPT, params)).prompt_logprobs

    answer = post(demo_endpoint, {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}).json()
    shown = answer["choices"][0]["prompt_logprobs"]
    expected = [
        found and {str(i): (one.logprob, one.rank, one.decoded_token) for i, one in found.items()}
        for found in run(direct())
    ]
    assert [found and {i: (*one.values(),) for i, one in found.items()} for found in shown] == (
        expected
    )


def test_an_answer_can_be_held_to_a_form(demo_endpoint: str) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}},
        {"structured_outputs": {"choice": ["7"]}},
    ]
    for form in forms:
        answer = post(demo_endpoint, {"prompt": PROMPT, **form}).json()
        assert json.loads(answer["choices"][0]["text"]) == 7


DETECTION = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 5}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_repeats_itself_ends(demo_endpoint: str, path: str, stream: bool) -> None:
    body = {
        "prompt": PROMPT, "messages": [{"role": "user", "content": "a"}], "max_tokens": 40,
        "temperature": 0, "logit_bias": {"380": 100}, "ignore_eos": True, "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
        "repetition_detection": DETECTION,
    }  # fmt: skip
    answer = post(demo_endpoint, body, path)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = answer.text.split("data: ")[1:-1]
        chunks = [json.loads(line) for line in lines]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        choice, usage = choices[-1], chunks[-1]["usage"]
    else:
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    assert usage["completion_tokens"] == 10


@pytest.mark.parametrize(
    ("detection", "words"),
    [
        ({"max_pattern_size": 0, "min_count": 2}, "max_pattern_size=0"),
        ({"max_pattern_size": 2}, "min_count is missing"),
        ({"max_pattern_size": "2", "min_count": 2}, "max_pattern_size must be an integer"),
        (4, "repetition_detection must be an object"),
    ],
)
def test_a_repetition_detection_out_of_range_is_refused(
    demo_endpoint: str, detection: Any, words: str
) -> None:
    answer = post(demo_endpoint, {"prompt": "a", "repetition_detection": detection})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": ["a"] * 1025}),
        ("suffix", {"suffix": "b"}),
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": 2, "use_beam_search": True}),
        ("priority", {"priority": -1}),
        ("max_tokens", {"max_tokens": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("response_format", {"response_format": {"type": "json_object"},
                             "structured_outputs": {"choice": ["a"]}}),
        (None, {"max_tokens": -1}),
        (None, {"logprobs": 1000}),
        (None, {"prompt": [1, 10**7]}),
        (None, {"prompt": [1, -1]}),
        (None, {"prompt": [[1], [10**30]]}),
        ("prompt", {"prompt": ["a", ""]}),
        ("prompt", {"prompt": [[]]}),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    demo_endpoint: str, field: str | None, body: dict[str, Any]
) -> None:
    answer = post(demo_endpoint, {"prompt": "a", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field is None or error["param"] == field


def test_a_batch_that_an_idle_engine_would_refuse_is_no_overload() -> None:
    with forked.engine(DEMO, "--max-num-queued-reqs", "4") as running:
        body = {"prompt": ["a"] * 2, "n": 3, "max_tokens": 1}
        answer = post(running.endpoint, body)
        assert answer.status_code == 400
        assert "6 samples" in answer.json()["error"]["message"]
        assert post(running.endpoint, {**body, "n": 2}).status_code == 200
        assert post(running.endpoint, {**body, "prompt": "a", "n": 6}).status_code == 200


def test_a_refused_prompt_takes_its_batch_along(demo_endpoint: str) -> None:
    """A stream of them is no stream then, and nothing runs on."""

    async def send() -> Any:
        async with app_of(demo_endpoint) as (app, http):
            body = {"prompt": [[1, 2], [1] * 3000], "stream": True, "ignore_eos": True}
            answer = await http.post("/v1/completions", json={**body, "max_tokens": 2000})
            assert app.state.client is not None
            while (await app.state.client.stats()).num_requests_running:
                pass  # an abort is under way
            return answer

    answer = run(send())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
