"""Datasets that are recorded traffic."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from nanocore.bench.dataset_options import AZURE, MOONCAKE, TIMED_TRACE, DatasetOptions
from nanocore.bench.datasets import PromptSource, load_requests
from nanocore.bench.load import BenchRequest
from nanocore.protocol.errors import ConfigError
from tests.bench.conftest import MakeFile

SOURCE = PromptSource(None, takes_text=False, vocab_size=5000)
TRACE = """\
{"timestamp": 27, "input_length": 9, "output_length": 5, "hash_ids": [3, 1, 8]}
{"timestamp": 20, "input_length": 10, "output_length": 7, "hash_ids": [3, 1, 9]}

{"timestamp": 30.5, "input_length": 6, "output_length": 1, "hash_ids": [4, 1]}
{"timestamp": 31, "input_length": 7, "output_length": 1, "hash_ids": [3]}
{"timestamp": 32, "input_length": 7, "output_length": 1, "hash_ids": [3]}
"""
CSV = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,20,109
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


def test_mooncakes_units_are_milliseconds_and_512_tokens(dataset_file: MakeFile) -> None:
    text = (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}\n'
    )
    options = DatasetOptions(dataset_name=MOONCAKE, dataset_path=dataset_file(text))
    first, second = load_requests(options, SOURCE)
    assert second.arrival_s == 1.5
    assert blocks(first, 512)[0] == blocks(second, 512)[0]
    assert blocks(first, 512)[1] != blocks(second, 512)[1][:88]
    twice_as_fast = load_requests(replace(options, timed_trace_sec_multiplier=0.0005), SOURCE)
    assert twice_as_fast[1].arrival_s == 0.75


def test_azures_csv(dataset_file: MakeFile) -> None:
    options = DatasetOptions(dataset_name=AZURE, dataset_path=dataset_file(CSV))
    requests = load_requests(options, SOURCE)
    assert [each.num_prompt_tokens for each in requests] == [374, 20]
    assert [each.num_output_tokens for each in requests] == [44, 109]
    assert [each.arrival_s for each in requests] == pytest.approx([0, 1.5])
    assert len(load_requests(replace(options, num_prompts=1), SOURCE)) == 1


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (TIMED_TRACE, "", "it has no request"),
        (TIMED_TRACE, "{", "line 1: Input data was truncated"),
        (TIMED_TRACE, "[]", "line 1: Expected `object`"),
        (TIMED_TRACE, '{"input_length": 1, "output_length": 1}', "line 1: timestamp is None"),
        (MOONCAKE, '\n{"timestamp": 0, "input_length": 0}', "line 2: input_length is 0"),
        (
            MOONCAKE,
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}',
            "line 1: a hash id is -1",
        ),
        (
            MOONCAKE,
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 7}',
            "line 1: hash_ids is 7",
        ),
        (AZURE, "a,b\n1,2\n", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (AZURE, CSV.replace("374", "many"), "line 2: invalid literal"),
        (AZURE, CSV.replace("2023-11-16 18:17:05", "then"), "line 3: Invalid isoformat"),
        (AZURE, CSV.replace("20,109", "20"), "line 3: invalid literal"),
    ],
)
def test_a_damaged_trace_is_named_by_its_line(
    name: str, text: str, problem: str, dataset_file: MakeFile
) -> None:
    options = DatasetOptions(dataset_name=name, dataset_path=dataset_file(text))
    with pytest.raises(ConfigError) as caught:
        load_requests(options, SOURCE)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_needs_its_file_and_an_endpoint_of_token_ids() -> None:
    with pytest.raises(ConfigError, match="needs its file"):
        load_requests(DatasetOptions(dataset_name=MOONCAKE), SOURCE)
    with pytest.raises(ConfigError, match="No such file"):
        load_requests(DatasetOptions(dataset_name=AZURE, dataset_path="/nowhere"), SOURCE)
    chat = replace(SOURCE, takes_token_ids=False)
    with pytest.raises(ConfigError, match="do not take"):
        load_requests(DatasetOptions(dataset_name=AZURE, dataset_path="/nowhere"), chat)
