"""Datasets that are texts."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest

from nanocore.bench.dataset_options import CUSTOM, SHAREGPT, DatasetOptions
from nanocore.bench.datasets import PromptSource, load_requests
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError
from tests.bench.conftest import MakeFile

QUESTION, ANSWER = "What is 123 + 456? Say it in words.", "It is 579, which is five hundred."
LINES = '{"prompt": "What is 1 + 2?", "output_tokens": 10}\n{"prompt": "Go", "output_tokens": 3}\n'


def conversations(*pairs: tuple[str, ...]) -> str:
    return json.dumps(
        [{"id": "x", "conversations": [{"from": "human", "value": v} for v in p]} for p in pairs]
    )


def sharegpt(path: str, num_prompts: int = 1) -> DatasetOptions:
    return DatasetOptions(dataset_name=SHAREGPT, dataset_path=path, num_prompts=num_prompts)


def custom(path: str, num_prompts: int = 2) -> DatasetOptions:
    return DatasetOptions(
        dataset_name=CUSTOM, dataset_path=path, num_prompts=num_prompts, disable_shuffle=True
    )


def test_a_conversation_gives_a_prompt_and_a_length(
    dataset_file: MakeFile, demo_tokenizer: Tokenizer
) -> None:
    options = sharegpt(dataset_file(conversations((QUESTION, ANSWER, "and more"))))
    num_tokens = len(demo_tokenizer.encode(QUESTION))
    for takes_text, prompt in (
        (True, QUESTION),
        (False, array("i", demo_tokenizer.encode(QUESTION))),
    ):
        (request,) = load_requests(options, PromptSource(demo_tokenizer, takes_text))
        assert (request.prompt, request.num_prompt_tokens) == (prompt, num_tokens)
        assert request.num_output_tokens == len(demo_tokenizer.encode(ANSWER))


def test_conversations_too_short_too_long_or_unanswered_are_left_out(
    dataset_file: MakeFile, demo_tokenizer: Tokenizer
) -> None:
    path = dataset_file(
        conversations(
            ("a", ANSWER),
            (QUESTION, "b"),
            (QUESTION * 200, ANSWER),
            (QUESTION,),
            (QUESTION, ANSWER),
        )
    )
    source = PromptSource(demo_tokenizer, takes_text=True)
    requests = load_requests(replace(sharegpt(path, 9), no_oversample=True), source)
    assert [request.prompt for request in requests] == [QUESTION]
    assert len(load_requests(sharegpt(path, 9), source)) == 9  # of the same one
    fixed = replace(sharegpt(path, 9), no_oversample=True, sharegpt_output_len=2)
    assert [each.num_output_tokens for each in load_requests(fixed, source)] == [2, 2]


def test_rows_are_shuffled_by_the_seed(dataset_file: MakeFile) -> None:
    lines = "".join(f'{{"prompt": "{i}", "output_tokens": 1}}\n' for i in range(50))
    options = replace(custom(dataset_file(lines), 50), skip_chat_template=True)
    source = PromptSource(None, takes_text=True)

    def order(options: DatasetOptions) -> list[object]:
        return [request.prompt for request in load_requests(options, source)]

    in_file = [str(i) for i in range(50)]
    assert order(options) == in_file
    shuffled = replace(options, disable_shuffle=False)
    assert order(shuffled) == order(shuffled) != order(replace(shuffled, seed=1))
    assert set(order(shuffled)) == set(in_file)


def test_custom_prompts_become_messages_unless_the_endpoint_does_that(
    dataset_file: MakeFile, demo_tokenizer: Tokenizer
) -> None:
    options = custom(dataset_file(LINES))
    ids = demo_tokenizer.encode_chat([{"role": "user", "content": "What is 1 + 2?"}])
    for takes_text in (True, False):
        first, _ = load_requests(options, PromptSource(demo_tokenizer, takes_text))
        assert (first.prompt, first.num_prompt_tokens) == (array("i", ids), len(ids))
    chat = PromptSource(demo_tokenizer, takes_text=True, has_template=False)
    first, second = load_requests(options, chat)
    assert (first.prompt, second.prompt) == ("What is 1 + 2?", "Go")
    assert (first.num_output_tokens, second.num_output_tokens) == (10, 3)
    plain = replace(options, skip_chat_template=True, custom_output_len=8)
    first, _ = load_requests(plain, PromptSource(None, takes_text=True))
    assert (first.prompt, first.num_prompt_tokens, first.num_output_tokens) == (
        "What is 1 + 2?", None, 8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (SHAREGPT, "{}", "not a list of objects with `conversations`"),
        (SHAREGPT, "[", "not a list of objects with `conversations`"),
        (SHAREGPT, "[]", "it has no usable row"),
        (CUSTOM, '{"prompt": 3}', 'line 1: "prompt" is missing, or not a text'),
        (CUSTOM, '{"prompt": "x"}', 'line 1: "output_tokens" is missing: give --custom-output-len'),
        (CUSTOM, '{"prompt": "x", "output_tokens": 0}', "line 1: output_tokens is 0"),
        (CUSTOM, "", "it has no usable row"),
    ],
)
def test_a_damaged_file_is_named(
    name: str, text: str, problem: str, dataset_file: MakeFile, demo_tokenizer: Tokenizer
) -> None:
    options = DatasetOptions(dataset_name=name, dataset_path=dataset_file(text), num_prompts=1)
    with pytest.raises(ConfigError) as caught:
        load_requests(options, PromptSource(demo_tokenizer, takes_text=True))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "takes_text", "problem"),
    [
        (CUSTOM, True, "--skip-chat-template"),
        (CUSTOM, False, "the model has no tokenizer"),
        (SHAREGPT, True, "--sharegpt-output-len"),
    ],
)
def test_what_needs_a_tokenizer_says_so(
    name: str, takes_text: bool, problem: str, dataset_file: MakeFile
) -> None:
    text = LINES if name == CUSTOM else conversations((QUESTION, ANSWER))
    options = DatasetOptions(dataset_name=name, dataset_path=dataset_file(text))
    with pytest.raises(ConfigError, match=problem):
        load_requests(options, PromptSource(None, takes_text))
