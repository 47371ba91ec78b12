"""Datasets that are drawn."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nanocore.bench.dataset_options import PREFIX_REPETITION, DatasetOptions
from nanocore.bench.datasets import PromptSource, load_requests
from nanocore.bench.load import BenchRequest
from nanocore.bench.synthetic import PromptVocabulary
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError

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


def test_random_requests_have_the_lengths_that_were_asked_for() -> None:
    requests = load_requests(RANDOM, BY_SIZE)
    assert len(requests) == 60
    assert {(len(ids(each)), each.num_prompt_tokens) for each in requests} == {(20, 20)}
    assert {each.num_output_tokens for each in requests} == {10}


def test_lengths_fill_the_range_and_do_not_leave_it() -> None:
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


def test_special_tokens_are_never_drawn(demo_tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    assert 7 not in BY_SIZE.vocabulary(as_text=False).draw(rng, 50_000)
    special = demo_tokenizer.backend.get_added_tokens_decoder().keys()
    assert special
    drawn = set(PromptVocabulary.of_tokenizer(demo_tokenizer, False).draw(rng, 50_000).tolist())
    assert not special & drawn
    assert len(drawn) == demo_tokenizer.backend.get_vocab_size() - len(special)


def test_tokens_that_the_model_does_not_have_are_never_drawn(demo_tokenizer: Tokenizer) -> None:
    source = PromptSource(demo_tokenizer, takes_text=False, vocab_size=300)
    drawn = source.vocabulary(as_text=False).draw(np.random.default_rng(0), 50_000)
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
