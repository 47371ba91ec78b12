"""client.chat: what is sent for a conversation, and the events of its answer."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from nanocore.client import AsyncEngineClient, EngineDeadError, SamplingParams, collect
from nanocore.client.chat.chat_request import ChatOptions, prepare_chat
from nanocore.client.chat.events import (
    ChatEvent,
    Failed,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.client.connection.tokenizer_loader import NUM_THREADS
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.codec import pack_int32, unpack_int32
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import Event, Submit, TokenLogprobs
from nanocore.protocol.structured_outputs import ReasoningMarks
from tests.client.fake_engine import FakeEngine, connected, welcome_message
from tests.client.running import run
from tests.tiny_models import write_byte_tokenizer

USER: Any = {"role": "user", "content": "hi"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = """\
{%- if tools %}{{- 'tools: <tool_call> ' + tools | tojson + '\\n' }}{% endif %}
{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{% endif %}{% endif %}
{#- </think> #}"""
ABLE = replace(welcome_message(), capabilities=["structured_outputs"])


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a model that thinks and calls tools."""
    folder = tmp_path_factory.mktemp("thinker")
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


async def asked(
    engine: FakeEngine,
    client: AsyncEngineClient,
    *texts: str,
    end: Event | None = None,
    **chat: Any,
) -> tuple[Submit, list[ChatEvent]]:
    """What was sent for a chat, and the events of an answer that comes in these pieces."""
    tokenizer = await client.get_tokenizer()

    async def read() -> list[ChatEvent]:
        return [event async for event in client.chat([USER], **chat)]

    reading = asyncio.create_task(read())
    submit = await engine.accept()
    first = Event(handle=1, num_cached_tokens=3)
    for text in texts:
        engine.output({1: tokenizer.encode(text)}, *([first] if first else []))
        first = None  # type: ignore[assignment]
    engine.output({1: [tokenizer.encode("<|end|>")[0]]}, Event(handle=1, finish_reason="stop"))
    return submit, await reading


def joined(events: list[ChatEvent]) -> list[ChatEvent]:
    result: list[Any] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, (Text, Reasoning, ToolArguments)) and type(last) is type(event):
            result[-1] = replace(last, delta=last.delta + event.delta)
        else:
            result.append(event)
    return result


async def test_an_answer_begins_has_text_and_ends_with_its_usage(
    endpoint: str, tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        submit, events = await asked(engine, client, "he", "llo", request_id="r")
        prompt = tokenizer.encode("user: hi\nassistant: ")
        assert unpack_int32(submit.prompt_token_ids).tolist() == prompt
        started, *rest = joined(events)
        assert isinstance(started, Started)
        assert [*started.prompt_token_ids] == prompt
        assert (started.request_id, started.num_cached_tokens) == ("r", 3)
        usage = Usage(len(prompt), 3, 6, 0)
        assert rest == [Text("hello"), Finished("stop", usage)]


@pytest.mark.parametrize("pieces", [1, 2, 5, 1000])
async def test_reasoning_and_tool_calls_are_events_however_they_are_cut(
    endpoint: str, thinker: Path, pieces: int
) -> None:
    text = f"<think>\nhm\n</think>\n\nI add.\n{CALL}"
    size = -(-len(text) // pieces)

    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        submit, events = await asked(engine, client, *parts, tools=TOOLS)
        prompt = bytes(unpack_int32(submit.prompt_token_ids))
        assert len(prompt) > len("user: hi\nassistant: ")
        started, thought, said, begin, arguments, finished = joined(events)
        assert isinstance(started, Started)
        assert (thought, said) == (Reasoning("hm"), Text("I add."))
        assert isinstance(begin, ToolBegin)
        assert (begin.tool_index, begin.name, begin.index) == (0, "add", 0)
        assert begin.id.startswith("call_")
        assert arguments == ToolArguments(0, '{"a": 1}')
        assert isinstance(finished, Finished)
        assert finished.finish_reason == "tool_calls"
        assert finished.usage.num_reasoning_tokens == len("hm")


@pytest.mark.parametrize(
    ("reasoning", "begin", "end"),
    [
        ("qwen3", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("seed_oss", "<seed:think>", "</seed:think>"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
async def test_reasoning_is_counted_up_to_the_token_that_ends_it(
    endpoint: str,
    thinker: Path,
    tmp_path: Path,
    reasoning: str,
    begin: str,
    end: str,
    special: bool,
) -> None:
    folder = Path(shutil.copytree(thinker, tmp_path / "model"))
    marked = Backend.from_file(str(folder / "tokenizer.json"))
    marked.add_tokens([AddedToken(mark, special=special) for mark in (begin, end)])
    marked.save(str(folder / "tokenizer.json"))

    async with connected(endpoint, tokenizer=folder) as (engine, client):
        options: Any = {"reasoning_parser": reasoning, "tool_parser": None}
        _, events = await asked(engine, client, f"{begin}hm \n\n{end}so", **options)
        *_, thought, said, finished = joined(events)
        assert (thought, said) == (Reasoning("hm "), Text("so"))
        assert isinstance(finished, Finished)
        assert finished.usage.num_reasoning_tokens == len([begin, *"hm \n\n", end])


async def test_calls_between_special_tokens_are_read(
    endpoint: str, thinker: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(thinker, tmp_path / "model"))
    marked = Backend.from_file(str(folder / "tokenizer.json"))
    marked.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    marked.save(str(folder / "tokenizer.json"))

    async with connected(endpoint, tokenizer=folder) as (engine, client):
        text = "I add.<|tool_call_start|>[add(a=1)]<|tool_call_end|>"
        _, events = await asked(engine, client, text, tools=TOOLS, tool_parser="lfm2")
        _, said, begin, arguments, _ = joined(events)
        assert said == Text("I add.")
        assert isinstance(begin, ToolBegin)
        assert (begin.name, arguments) == ("add", ToolArguments(0, '{"a": 1}'))


R1 = """\
{%- for m in messages %}{{- m.content.split('</think>')[-1] }}{% endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c>' + tail | default('') }}{% endif %}"""
NAMED_R1 = {"reasoning_parser": "deepseek_r1"}


@pytest.mark.parametrize(
    ("template", "tail", "options", "thinks"),
    [
        (R1, "", {}, True),
        (R1, "<think>\n", {}, True),
        (R1, "</think>", {}, False),
        (R1, "", {"messages": [USER, {"role": "assistant", "content": "so"}]}, False),
        (TEMPLATE, "", {}, False),
        (TEMPLATE, "", NAMED_R1, True),
    ],
)
def test_deepseek_thinks_without_an_opening_mark(
    tmp_path: Path, template: str, tail: str, options: Any, thinks: bool
) -> None:
    write_byte_tokenizer(tmp_path)
    text = template.replace("tail | default('')", repr(tail))
    (tmp_path / "chat_template.jinja").write_text(text)
    tokenizer = Tokenizer.from_folder(tmp_path)
    options = dict(options)
    messages = options.pop("messages", [USER])
    if len(messages) > 1:
        options["continue_final_message"] = True
    parser = prepare_chat(messages, options, tokenizer, SamplingParams()).new_parser(0)
    said = joined([*parser.feed("hm</think>so"), *parser.finish()])
    assert said == ([Reasoning("hm"), Text("so")] if thinks else [Text("hm</think>so")])
    tokenizer.close()


async def test_parsers_can_be_named_and_left_out(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        options: Any = {"tool_parser": None, "reasoning_parser": None}
        _, events = await asked(engine, client, f"<think>a</think>{CALL}", tools=TOOLS, **options)
        assert joined(events)[1:-1] == [Text(f"<think>a</think>{CALL}")]
        with pytest.raises(InvalidRequestError, match="'nope'"):
            await anext(client.chat([USER], tools=TOOLS, tool_parser="nope"))
        with pytest.raises(InvalidRequestError, match="'nope'"):
            await anext(client.chat([USER], reasoning_parser="nope"))


async def test_tools_that_may_not_be_called_are_not_shown(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        submit, events = await asked(engine, client, CALL, tools=TOOLS, tool_choice="none")
        assert len(unpack_int32(submit.prompt_token_ids)) == len("user: hi\nassistant: ")
        assert joined(events)[1:-1] == [Text(CALL)]


NAMED: Any = {"type": "function", "function": {"name": "add"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
FORCED: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "named": ({"tools": TOOLS, "tool_choice": NAMED}, '{"a": 12}', [("add", '{"a": 12}')]),
    "required": (
        {"tools": TOOLS, "tool_choice": "required"},
        '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {}}]',
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    "response_format": ({"response_format": FORMAT}, "null", []),
}


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("open_thought", [True, False])
async def test_forced_answers_are_structured_outputs_after_the_reasoning(
    endpoint: str, thinker: Path, name: str, open_thought: bool
) -> None:
    options, text, calls = FORCED[name]
    kwargs = {"chat_template_kwargs": {"enable_thinking": open_thought}}

    async with connected(endpoint, ABLE, tokenizer=thinker) as (engine, client):
        thought = "hm</think>\n\n" if open_thought else ""
        submit, events = await asked(engine, client, thought, text, **options, **kwargs)
        wanted = submit.sampling.structured_outputs
        assert wanted is not None
        assert wanted.json is not None
        marks = ReasoningMarks(begin="" if open_thought else "<think>", end="</think>")
        assert wanted.reasoning == marks
        (answer,) = await collect(_again(events))
        assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
        assert answer.content == ("" if calls else text)
        assert answer.reasoning == ("hm" if open_thought else "")
        assert answer.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("empty", ['{"name": "add", "arguments": null}', '{"name": "add"}'])
async def test_calls_without_arguments_have_an_empty_object(
    endpoint: str, thinker: Path, empty: str
) -> None:
    call = f"<tool_call>\n{empty}\n</tool_call>\n"

    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        _, events = await asked(engine, client, call, call + CALL + call, tools=TOOLS)
        (answer,) = await collect(_again(events))
        assert [one.arguments for one in answer.tool_calls] == ["{}", "{}", '{"a": 1}', "{}"]


@pytest.mark.parametrize("name", ["named", "required"])
async def test_forced_calls_have_ids_as_the_models_template_wants_them(
    endpoint: str, thinker: Path, name: str
) -> None:
    options, text, _ = FORCED[name]

    async with connected(endpoint, ABLE, tokenizer=thinker) as (engine, client):
        _, events = await asked(engine, client, text, **options, tool_parser="mistral")
        (answer,) = await collect(_again(events))
        assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.tool_calls)
        assert answer.tool_calls


async def _again(events: list[ChatEvent]) -> Any:
    for event in events:
        yield event


async def test_an_answer_becomes_a_turn_of_the_conversation(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        _, events = await asked(engine, client, f"<think>hm</think>ok{CALL}", tools=TOOLS)
        (answer,) = await collect(_again(events))
        turn = answer.to_message()
        (call,) = turn.pop("tool_calls")
        assert turn == {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert json.loads(json.dumps(call)) == call


async def test_several_samples_are_parsed_apart(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        tokenizer = await client.get_tokenizer()
        answers = asyncio.create_task(
            collect(client.chat([USER], SamplingParams(n=2), tools=TOOLS))
        )
        await engine.accept()
        for first, second in zip(("<thi", "nk>a</think>b"), ("c", CALL), strict=True):
            engine.output({1: tokenizer.encode(first), 2: tokenizer.encode(second)})
        ends = [Event(handle=h, finish_reason="length") for h in (1, 2)]
        engine.output({}, *ends)
        one, two = await answers
        assert (one.reasoning, one.content, one.tool_calls) == ("a", "b", [])
        assert (two.content, [call.name for call in two.tool_calls]) == ("c", ["add"])
        assert (one.finish_reason, two.finish_reason) == ("length", "length")


async def test_logprobs_come_with_their_tokens(endpoint: str, tokenizer_folder: Path) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        chat = client.chat([USER], SamplingParams(logprobs=0))

        async def read() -> list[ChatEvent]:
            return [event async for event in chat]

        reading = await engine.begin(read())
        for token, logprob in ((65, -0.5), (66, -1.0)):
            columns = TokenLogprobs(
                handles=pack_int32([1]), ranks=pack_int32([1]), counts=pack_int32([1]),
                token_ids=pack_int32([token]), logprobs=array("f", [logprob]).tobytes(),
            )  # fmt: skip
            engine.output({1: [token]}, logprobs=columns)
        engine.finish()
        shown = [
            one for event in await reading if isinstance(event, Logprobs) for one in event.tokens
        ]
        assert [[*one] for one in shown] == [[65], [66]]
        assert [one[token].logprob for one, token in zip(shown, (65, 66), strict=True)] == [
            -0.5,
            -1.0,
        ]


def test_a_failure_is_an_event_and_then_raised(endpoint: str, tokenizer_folder: Path) -> None:
    async def scenario() -> None:
        async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
            events = client.chat([USER])
            reading = await engine.begin(anext(events))
            engine.output({1: [65]})
            assert isinstance(await reading, Started)
            assert isinstance(await anext(events), Text)
            last = asyncio.create_task(anext(events))
            await asyncio.sleep(0)
            engine.close()
            failed = await last
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, EngineDeadError)
            with pytest.raises(EngineDeadError) as raised:
                await anext(events)
            assert raised.value is failed.error

    run(scenario(), 60)


async def test_what_users_write_of_marks_opens_no_reasoning(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (engine, client):
        tokenizer = await client.get_tokenizer()
        user = {"role": "user", "content": "What is <think>?"}
        answers = asyncio.create_task(collect(client.chat([user])))  # type: ignore[list-item]
        await engine.accept()
        engine.output({1: tokenizer.encode("A mark.")}, Event(handle=1, finish_reason="length"))
        (answer,) = await answers
        assert (answer.reasoning, answer.content) == ("", "A mark.")


def test_a_chat_that_is_cancelled_before_its_turn_is_never_rendered(
    endpoint: str, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, rendered = threading.Event(), threading.Event(), []

    def prepare(messages: Any, *others: Any) -> Any:
        rendered.append(messages[0]["content"])
        began.set()
        assert may_end.wait(30)
        raise InvalidRequestError("enough")

    monkeypatch.setattr("nanocore.client.async_client.prepare_chat", prepare)

    async def scenario() -> None:
        async with connected(endpoint, tokenizer=tokenizer_folder) as (_, client):
            await client.get_tokenizer()

            def chat(text: str) -> Any:
                return asyncio.create_task(
                    collect(client.chat([{"role": "user", "content": text}]))
                )

            running = [chat(f"running {i}") for i in range(NUM_THREADS)]
            await asyncio.to_thread(began.wait, 30)
            waiting = [chat(f"waiting {i}") for i in range(5)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert await asyncio.to_thread(lambda: 1) == 1  # other threads are free
            may_end.set()
            await asyncio.gather(*running, return_exceptions=True)

    run(scenario(), 60)
    assert sorted(rendered) == [f"running {i}" for i in range(NUM_THREADS)]


def test_a_clients_end_ends_its_render_process(endpoint: str, thinker: Path) -> None:
    async def scenario() -> int:
        async with connected(endpoint, tokenizer=thinker) as (engine, client):
            await asked(engine, client, "hi")
            tokenizer = await client.get_tokenizer()
            process = tokenizer.templates().template(has_tools=False)._renderer._process
            assert process is not None
            assert process.poll() is None
            pid = process.pid
        assert process.returncode is not None
        return pid

    assert not Path(f"/proc/{run(scenario())}").exists()


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"tool_parser": []}, {"reasoning_parser": {}}, {"parallel_tool_calls": "no"},
    {"add_generation_prompt": "no"}, {"continue_final_message": 1.5},
    {"allowed_template_kwargs": 5, "chat_template_kwargs": {"a": 1}},
    {"allowed_template_kwargs": "enable_thinking", "chat_template_kwargs": {"a": 1}},
    {"tools": (tool for tool in TOOLS)}, {"tools": [{"function": {"name": "f", "x": {1}}}]},
    {"sampling_params": SamplingParams(detokenize=False)},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=[*map(str, range(len(WRONG_OPTIONS)))])
async def test_options_of_another_type_are_refused_by_name(
    endpoint: str, thinker: Path, options: dict[str, Any]
) -> None:
    async with connected(endpoint, tokenizer=thinker) as (_, client):
        name = next(iter(options)).replace("sampling_params", "detokenize")
        with pytest.raises(InvalidRequestError, match=name):
            await anext(client.chat([USER], **options))


async def test_a_message_without_a_role_is_refused_by_place(endpoint: str, thinker: Path) -> None:
    async with connected(endpoint, tokenizer=thinker) as (_, client):
        for role in ({}, {"role": 5}, {"role": ""}):
            with pytest.raises(InvalidRequestError, match=r"messages\[1\] has no role"):
                await anext(client.chat([USER, {"content": "x", **role}]))


def test_the_end_of_a_chatml_turn_ends_the_response(tokenizer: Tokenizer) -> None:
    options: ChatOptions = {"chat_template": "chatml"}
    params = SamplingParams(stop="x", stop_token_ids=[3])
    prepared = prepare_chat([USER], options, tokenizer, params).params
    assert (prepared.stop, prepared.stop_token_ids) == (["x", "<|im_end|>"], [3])
    knowing = Tokenizer.from_folder(demo_model_folder())
    prepared = prepare_chat([USER], options, knowing, params).params
    end = knowing.backend.token_to_id("<|im_end|>")
    assert (prepared.stop, prepared.stop_token_ids) == ("x", [3, end])
    assert prepare_chat([USER], {}, knowing, params).params == params


async def test_an_unknown_option_is_a_type_error(endpoint: str, tokenizer_folder: Path) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (_, client):
        with pytest.raises(TypeError, match="'tool'"):
            await anext(client.chat([USER], tool=TOOLS))  # type: ignore[call-arg]
