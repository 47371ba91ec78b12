"""Request fields of all dialects: prompts, sampling, tools, thinking."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.dialects.anthropic_messages import MessagesRequest, conversation
from nanocore.http.dialects.chat_completions import ChatCompletionRequest
from nanocore.http.dialects.completions import CompletionRequest
from nanocore.http.dialects.prompts import MAX_PROMPTS, num_kept_tokens, read_prompts
from nanocore.http.dialects.request_fields import SamplingFields
from nanocore.http.dialects.responses.response_items import read_response_tools
from nanocore.http.dialects.responses.response_request import ResponsesRequest
from nanocore.http.endpoints.tokenize import TokenizeRequest
from nanocore.http.http_errors import HttpError
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.sampling import EngineSamplingParams, SamplingParams
from tests.client.running import run
from tests.end_to_end.test_compile_process import DEMO_MODEL as DEMO
from tests.http.asgi import Connection, app_of, ask, exchange


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_or_several_as_text_or_token_ids(given: Any, prompts: Any) -> None:
    assert read_prompts(given, "prompt") == prompts


@pytest.mark.parametrize("given", [[], ["a", 1], [1, [2]], ["a", [2]], ["a"] * (MAX_PROMPTS + 1)])
def test_what_is_none_of_these_is_refused(given: Any) -> None:
    with pytest.raises(HttpError) as raised:
        read_prompts(given, "input")
    assert raised.value.status == 400
    assert raised.value.param == "input"


def test_so_many_of_the_last_tokens_are_kept() -> None:
    asked = [(None, 1), (2, 1), (-1, 3), (-1, -5)]
    assert [num_kept_tokens(*each) for each in asked] == [None, 2, 3, 1]


@pytest.mark.parametrize("num_tokens", [0, -2])
def test_a_truncation_to_nothing_is_refused(num_tokens: int) -> None:
    with pytest.raises(HttpError, match="truncate_prompt_tokens"):
        num_kept_tokens(num_tokens, 1)


TURNS = [{"role": "user", "content": "What is 1 + 2?"}]
PROMPT = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"


def read(max_tokens: int | None = None, **fields: Any) -> SamplingParams:
    return SamplingFields(**fields).sampling_params(EngineSamplingParams(), max_tokens, None)


@pytest.mark.parametrize(
    ("given", "seed"),
    [
        (0, 0),
        (2**53 - 1, 2**53 - 1),
        (2**53, 0),
        (2**63 - 1, 2**53 - 1),
        (-2, 2**53 - 2),
        (-(2**63), 0),
        (-1, None),
    ],
)
def test_a_seed_is_any_int64(given: int, seed: int | None) -> None:
    assert read(seed=given).seed == seed


@pytest.mark.parametrize("given", [2**63, -(2**63) - 1, 10**4000])
def test_other_seeds_are_refused(given: int) -> None:
    with pytest.raises(HttpError, match="int64") as refused:
        read(seed=given)
    assert (refused.value.status, refused.value.param) == (400, "seed")


def test_max_tokens_beyond_the_engines_numbers_are_as_many_as_it_has() -> None:
    assert [read(n).max_tokens for n in (2**31 - 1, 2**31, 2**63, 10**30)] == [2**31 - 1] * 4


def test_a_top_p_of_0_is_greedy() -> None:
    params = read(top_p=0, temperature=2)
    assert (params.top_p, params.temperature) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": TURNS}),
        ("/v1/completions", "max_tokens", {"prompt": PROMPT}),
        ("/v1/responses", "max_output_tokens", {"input": TURNS}),
        ("/v1/messages", "max_tokens", {"messages": TURNS}),
    ],
)
def test_every_dialect_takes_them(demo_endpoint: str, path: str, name: str, body: Any) -> None:
    async def send() -> Any:
        async with app_of(demo_endpoint) as (_, http):
            asked = {name: 2**40, "seed": -(2**63), "top_p": 0}
            return await http.post(path, json=body | asked)

    assert run(send()).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": [-1]}, "prompt[0]=-1"),
        ("/v1/embeddings", {"input": [-1]}, "input[0]=-1"),
        ("/v1/responses", {"input": TURNS, "max_output_tokens": 0}, "max_output_tokens=0"),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 1, "stop_sequences": [""]},
         "stop_sequences=''"),
        ("/v1/completions", {"prompt": [10**30]}, "token ids must be integers in [0, 2**31)"),
        ("/v1/completions", {"prompt": "a", "priority": 0.5}, "priority must be an integer"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_their_dialect(
    demo_endpoint: str, path: str, body: dict[str, Any], said: str
) -> None:
    answer = ask(demo_endpoint, path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]["message"]
    assert error.startswith(said)
    assert "`" not in error


@pytest.mark.parametrize(
    ("served", "asked", "status"),
    [
        ((), str(DEMO), 200),
        ((), DEMO.name, 200),
        ((), DEMO.parent.name, 404),
        (("org/demo",), "demo", 404),
        (("org/demo",), DEMO.name, 404),
    ],
)
def test_a_model_without_a_name_goes_by_its_path_or_the_last_part_of_it(
    demo_endpoint: str, served: tuple[str, ...], asked: str, status: int
) -> None:
    body = {"messages": TURNS, "max_tokens": 1, "model": asked}
    answer = ask(demo_endpoint, "/v1/chat/completions", body, served_model_names=served)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["model"] == asked


def test_a_response_s_id_holds_the_client_s_and_is_unique(demo_endpoint: str) -> None:
    async def send() -> list[Any]:
        async with app_of(demo_endpoint) as (_, http):
            body = {"messages": TURNS, "max_tokens": 1}
            both = [
                http.post("/v1/chat/completions", json=body, headers={"x-request-id": "my/1"})
                for _ in range(2)
            ]
            return await asyncio.gather(*both)

    answers = run(send())
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json()["id"] for answer in answers)
    assert first != second
    assert re.fullmatch("chatcmpl-my/1-[0-9a-f]{8}", first)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("guided_json", {}, "guided_json is structured_outputs.json here"),
        ("guided_choice", ["a"], "guided_choice is structured_outputs.choice here"),
        ("grammar", 'root ::= "a"', "structured_outputs.grammar, in Lark's syntax, here"),
        ("json_schema", {}, "json_schema is structured_outputs.json here"),
        ("format", "json", "structured_outputs.json_object=true, here"),
        ("options", {"num_predict": 3}, "max_tokens, temperature and the others"),
        ("guided_regex", None, None),
        ("min_tokens_to_keep", 3, None),
    ],
)
@pytest.mark.parametrize(
    "kind", [ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest]
)
async def test_a_constraint_of_another_engine_is_not_ignored(
    kind: type[SamplingFields], name: str, value: Any, said: str | None
) -> None:
    body = {"messages": TURNS, "prompt": PROMPT, "input": TURNS, "max_tokens": 1, name: value}
    asked = exchange(Connection(json.dumps(body).encode()))
    if said is None:
        await asked.read(kind)
        assert name.encode() in asked.reply_headers[b"nanocore-ignored"]
        return
    with pytest.raises(HttpError) as caught:
        await asked.read(kind)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert said in caught.value.message


@pytest.mark.parametrize("key", [" 5", "5_0", "+5", "-5", "\u0665", "", "a", "1" * 5000])
def test_a_key_of_logit_bias_is_decimal_digits(key: str) -> None:
    assert read(logit_bias={"05": 1.0}).logit_bias == {5: 1.0}
    with pytest.raises(HttpError, match="logit_bias has the key") as refused:
        read(logit_bias={key: 1.0})
    assert refused.value.param == "logit_bias"


def test_two_keys_of_logit_bias_for_one_token_are_refused() -> None:
    with pytest.raises(HttpError, match="two keys for one token id") as refused:
        read(logit_bias={"5": 1.0, "05": 2.0})
    assert refused.value.param == "logit_bias"


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub", "mul")]


def allowed(mode: str | None, *names: str) -> dict[str, Any]:
    """As OpenAI's chat completions have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
def test_allowed_tools_are_those_that_the_model_sees(mode: str, kind: Any) -> None:
    choice = allowed(mode, "mul", "add")
    options = kind(messages=TURNS, tools=TOOLS, tool_choice=choice).options(AppSettings())
    assert (options["tools"], options["tool_choice"]) == ([TOOLS[0], TOOLS[2]], mode)


@pytest.mark.parametrize(
    "choice", [{"type": "allowed_tools", "allowed_tools": 1}, allowed("none", "add"), allowed(None)]
)
def test_allowed_tools_of_another_form_are_refused(choice: Any) -> None:
    request = ChatCompletionRequest(messages=TURNS, tools=TOOLS, tool_choice=choice)
    with pytest.raises(HttpError, match="allowed_tools needs tools, a list, and mode") as refused:
        request.options(AppSettings())
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_an_allowed_tool_that_is_not_there_is_refused_by_its_place(mode: str) -> None:
    request = ChatCompletionRequest(
        messages=TURNS, tools=TOOLS, tool_choice=allowed(mode, "add", "div")
    )
    place = "tool_choice.allowed_tools.tools[1]"
    with pytest.raises(HttpError, match="which is not one of the tools") as refused:
        request.options(AppSettings())
    assert (refused.value.status, refused.value.param) == (400, place)
    entries = [{"type": "web_search"}, {"type": "function", "name": "div"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": entries}
    with pytest.raises(HttpError) as refused:
        read_response_tools([{"type": "function", "name": "add"}], choice)
    assert refused.value.param == "tool_choice.tools[1]"


def test_auto_without_tools_is_none() -> None:
    options = ChatCompletionRequest(messages=TURNS, tool_choice="auto").options(AppSettings())
    assert (options["tools"], options["tool_choice"]) == (None, None)


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "x": 1}}


def options(**fields: Any) -> ChatOptions:
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = msgspec.convert(asked, MessagesRequest)
    return conversation(exchange(Connection()), request)[1]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "between_tools"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 1024},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "of a later year"}}, {}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}},
            {"enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_thinking_is_said_to_the_template(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert options(**fields)["chat_template_kwargs"] == wanted


def test_tools_are_functions() -> None:
    found = options(tools=[TOOL, {"name": "g", "type": "custom", "strict": True}])["tools"]
    parameters = {"type": "object", "properties": {}}
    assert found == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]},
        },
        {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": True}},
    ]


def test_without_tools_of_the_clients_own_there_are_none() -> None:
    for tools in (None, [], [{"type": "bash_20250124", "name": "bash"}]):
        found = options(tools=tools, tool_choice={"type": "auto"})
        assert (found["tools"], found["tool_choice"]) == (None, None)


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_choices_of_tools_are_those_of_chat(choice: Any, wanted: Any, parallel: bool) -> None:
    found = options(tools=[TOOL], tool_choice=choice)
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (wanted, parallel)
