"""Datasets of bench: conversations, traces and synthetic prompts."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nanocore.bench.dataset_options import (
    CUSTOM,
    PREFIX_REPETITION,
    SHAREGPT,
    TIMED_TRACE,
    DatasetOptions,
)
from nanocore.bench.datasets import PromptSource, PromptVocabulary, load_requests
from nanocore.bench.load import BenchRequest
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


SOURCE = PromptSource(None, takes_text=False, vocab_size=5000)
TRACE = """\
{"timestamp": 27, "input_length": 9, "output_length": 5, "hash_ids": [3, 1, 8]}
{"timestamp": 20, "input_length": 10, "output_length": 7, "hash_ids": [3, 1, 9]}

{"timestamp": 30.5, "input_length": 6, "output_length": 1, "hash_ids": [4, 1]}
{"timestamp": 31, "input_length": 7, "output_length": 1, "hash_ids": [3]}
{"timestamp": 32, "input_length": 7, "output_length": 1, "hash_ids": [3]}
"""


def blocks(request: BenchRequest, size: int = 4) -> list[list[int]]:
    assert isinstance(request.prompt, array)
    ids = request.prompt.tolist()
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is(dataset_file: MakeFile) -> None:
    options = DatasetOptions(
        dataset_name=TIMED_TRACE, dataset_path=dataset_file(TRACE), timed_trace_chunk_hash_size=4
    )
    requests = load_requests(options, SOURCE)
    assert [each.arrival_s for each in requests] == [0, 7, 10.5, 11, 12]
    assert [each.num_prompt_tokens for each in requests] == [10, 9, 6, 7, 7]
    assert [each.num_output_tokens for each in requests] == [7, 5, 1, 1, 1]
    first, second, third, fourth, fifth = map(blocks, requests)
    assert first[:2] == second[:2]  # 3 and 1
    assert [len(block) for block in second] == [4, 4, 1]
    assert first[2][:1] != second[2]  # 9 and 8
    assert third[1] == first[1][:2]  # 1, cut
    assert third[0] != first[0]
    assert fourth[0] == fifth[0] == first[0]
    assert fourth[1] != fifth[1]  # of no hash id


def test_the_seed_decides_the_tokens(dataset_file: MakeFile) -> None:
    options = DatasetOptions(dataset_name=TIMED_TRACE, dataset_path=dataset_file(TRACE))
    assert load_requests(options, SOURCE) == load_requests(options, SOURCE)
    assert load_requests(options, SOURCE) != load_requests(replace(options, seed=1), SOURCE)


def test_mooncakes_traces_have_milliseconds_and_512_tokens(dataset_file: MakeFile) -> None:
    text = (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}\n'
    )
    options = DatasetOptions(
        dataset_name=TIMED_TRACE,
        dataset_path=dataset_file(text),
        timed_trace_chunk_hash_size=512,
        timed_trace_sec_multiplier=0.001,
    )
    first, second = load_requests(options, SOURCE)
    assert second.arrival_s == 1.5
    assert blocks(first, 512)[0] == blocks(second, 512)[0]
    assert blocks(first, 512)[1] != blocks(second, 512)[1][:88]
    twice_as_fast = load_requests(replace(options, timed_trace_sec_multiplier=0.0005), SOURCE)
    assert twice_as_fast[1].arrival_s == 0.75


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no request"),
        ("{", "line 1: Input data was truncated"),
        ("[]", "line 1: Expected `object`"),
        ('{"input_length": 1, "output_length": 1}', "line 1: timestamp is None"),
        ('\n{"timestamp": 0, "input_length": 0}', "line 2: input_length is 0"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}',
            "line 1: a hash id is -1",
        ),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 7}',
            "line 1: hash_ids is 7",
        ),
    ],
)
def test_a_damaged_trace_is_named_by_its_line(
    text: str, problem: str, dataset_file: MakeFile
) -> None:
    options = DatasetOptions(dataset_name=TIMED_TRACE, dataset_path=dataset_file(text))
    with pytest.raises(ConfigError) as caught:
        load_requests(options, SOURCE)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_needs_its_file_and_an_endpoint_of_token_ids() -> None:
    with pytest.raises(ConfigError, match="needs its file"):
        load_requests(DatasetOptions(dataset_name=TIMED_TRACE), SOURCE)
    with pytest.raises(ConfigError, match="No such file"):
        load_requests(DatasetOptions(dataset_name=TIMED_TRACE, dataset_path="/nowhere"), SOURCE)
    chat = replace(SOURCE, takes_token_ids=False)
    with pytest.raises(ConfigError, match="do not take"):
        load_requests(DatasetOptions(dataset_name=TIMED_TRACE, dataset_path="/nowhere"), chat)


BY_SIZE = PromptSource(None, takes_text=False, vocab_size=1000, eos_token_ids=(7,))
RANDOM = DatasetOptions(num_prompts=60, random_input_len=20, random_output_len=10, seed=5)
PREFIXES = DatasetOptions(
    dataset_name=PREFIX_REPETITION,
    num_prompts=13,
    prefix_repetition_num_prefixes=3,
    prefix_repetition_prefix_len=8,
    prefix_repetition_suffix_len=4,
    prefix_repetition_output_len=6,
)


def ids(request: BenchRequest) -> list[int]:
    assert isinstance(request.prompt, array)
    return request.prompt.tolist()


def test_random_lengths_are_those_asked_for_and_fill_their_range() -> None:
    requests = load_requests(RANDOM, BY_SIZE)
    assert len(requests) == 60
    assert {(len(ids(each)), each.num_prompt_tokens) for each in requests} == {(20, 20)}
    assert {each.num_output_tokens for each in requests} == {10}

    options = replace(RANDOM, num_prompts=500, random_range_ratio=(0.1, 0.5))
    requests = load_requests(options, BY_SIZE)
    assert {len(ids(each)) for each in requests} == set(range(18, 23))
    assert {each.num_output_tokens for each in requests} == set(range(5, 16))


def test_all_random_prompts_share_the_prefix_and_no_more() -> None:
    requests = load_requests(replace(RANDOM, random_prefix_len=8), BY_SIZE)
    assert {each.num_prompt_tokens for each in requests} == {28}
    assert len({tuple(ids(each)[:8]) for each in requests}) == 1
    assert len({tuple(ids(each)[8:]) for each in requests}) == 60


@pytest.mark.parametrize("options", [RANDOM, PREFIXES])
def test_the_seed_decides(options: DatasetOptions) -> None:
    once, again = load_requests(options, BY_SIZE), load_requests(options, BY_SIZE)
    other = load_requests(replace(options, seed=6), BY_SIZE)
    assert once == again
    assert list(map(ids, once)) != list(map(ids, other))


def test_tokens_that_are_special_or_missing_are_never_drawn(
    demo_tokenizer: Tokenizer,
) -> None:
    rng = np.random.default_rng(0)
    assert 7 not in PromptVocabulary(BY_SIZE, as_text=False).draw(rng, 50_000)
    special = demo_tokenizer.backend.get_added_tokens_decoder().keys()
    assert special
    whole = PromptSource(demo_tokenizer, takes_text=False)
    drawn = set(PromptVocabulary(whole, as_text=False).draw(rng, 50_000).tolist())
    assert not special & drawn
    assert len(drawn) == demo_tokenizer.backend.get_vocab_size() - len(special)

    source = PromptSource(demo_tokenizer, takes_text=False, vocab_size=300)
    drawn = PromptVocabulary(source, as_text=False).draw(np.random.default_rng(0), 50_000)
    assert max(drawn) == 299


def test_texts_have_about_as_many_tokens_as_were_asked_for(demo_tokenizer: Tokenizer) -> None:
    """And say how many, where tokenizing a text of random tokens gives others."""
    requests = load_requests(RANDOM, PromptSource(demo_tokenizer, takes_text=True))
    lengths = []
    for each in requests:
        assert isinstance(each.prompt, str)
        lengths.append(len(demo_tokenizer.encode(each.prompt)))
        assert each.num_prompt_tokens == lengths[-1]
    assert abs(np.mean(lengths) - 20) < 1
    assert Counter(lengths).most_common(1)[0][0] == 20


def test_prefixes_are_repeated_evenly() -> None:
    requests = load_requests(PREFIXES, BY_SIZE)
    prefixes = Counter(tuple(ids(each)[:8]) for each in requests)
    assert sorted(prefixes.values()) == [4, 4, 4]
    assert {(len(ids(each)), each.num_output_tokens) for each in requests} == {(12, 6)}
    in_turn = load_requests(replace(PREFIXES, disable_shuffle=True), BY_SIZE)
    assert [tuple(ids(each)[:8]) for each in in_turn[:4]] == [tuple(ids(in_turn[0])[:8])] * 4
    assert sorted(map(ids, in_turn)) == sorted(map(ids, requests))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (replace(RANDOM, random_input_len=0), "could be empty"),
        (replace(PREFIXES, num_prompts=2), "--num-prompts 2 is less than"),
        (replace(PREFIXES, dataset_path="x"), "takes no file"),
        (
            replace(PREFIXES, prefix_repetition_prefix_len=0, prefix_repetition_suffix_len=0),
            "both 0",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: DatasetOptions, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_requests(options, BY_SIZE)


def test_a_server_without_a_tokenizer_needs_one() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        load_requests(RANDOM, PromptSource(None, takes_text=True))
