"""Datasets that are drawn: `random`, and `prefix_repetition` whose prompts share prefixes.

The same options, vocabulary and seed give the same requests.
"""

from __future__ import annotations

import math

import numpy as np

from nanocore.bench.dataset_options import DatasetOptions
from nanocore.bench.outcome import BenchRequest
from nanocore.bench.vocabulary import TokenIds, Vocabulary
from nanocore.protocol.errors import ConfigError


def random_requests(options: DatasetOptions, vocabulary: Vocabulary) -> list[BenchRequest]:
    """One prefix for all, then tokens of their own; lengths uniform around those asked for.

    Raises:
        ConfigError: a prompt might have no tokens.
    """
    rng = np.random.default_rng(options.seed)
    input_ratio, output_ratio = options.random_range_ratio
    own_len = max(0, options.random_input_len - vocabulary.num_added_tokens)
    least, most = _range(own_len, input_ratio)
    if options.random_prefix_len + least < 1:
        raise ConfigError(
            f"--random-input-len {options.random_input_len}: with a range ratio of {input_ratio:g} "
            f"and {vocabulary.num_added_tokens} tokens that the tokenizer adds a prompt could be "
            "empty; raise it, or --random-prefix-len"
        )
    input_lens = rng.integers(least, most + 1, options.num_prompts)
    least, most = _range(options.random_output_len, output_ratio)
    output_lens = rng.integers(max(1, least), max(1, most) + 1, options.num_prompts)
    prefix = vocabulary.draw(rng, options.random_prefix_len)
    return [
        _request(vocabulary, rng, prefix, int(input_len), int(output_len))
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def prefix_repetition_requests(
    options: DatasetOptions, vocabulary: Vocabulary
) -> list[BenchRequest]:
    """As many prompts for each prefix, each with a suffix of its own; shuffled.

    Raises:
        ConfigError: there are fewer prompts than prefixes, or they have no tokens.
    """
    num_prefixes, num_prompts = options.prefix_repetition_num_prefixes, options.num_prompts
    prefix_len = options.prefix_repetition_prefix_len
    suffix_len = options.prefix_repetition_suffix_len
    if num_prompts < num_prefixes:
        raise ConfigError(
            f"--num-prompts {num_prompts} is less than --prefix-repetition-num-prefixes "
            f"{num_prefixes}: each prefix begins at least one prompt"
        )
    if prefix_len + suffix_len < 1:
        raise ConfigError("--prefix-repetition-prefix-len and -suffix-len are both 0")
    rng = np.random.default_rng(options.seed)
    requests = []
    for _ in range(num_prefixes):
        prefix = vocabulary.draw(rng, prefix_len)
        requests += [
            _request(vocabulary, rng, prefix, suffix_len, options.prefix_repetition_output_len)
            for _ in range(num_prompts // num_prefixes)
        ]
    if options.disable_shuffle:
        return requests
    return [requests[i] for i in rng.permutation(len(requests))]


def _range(length: int, ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))


def _request(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    prefix: TokenIds,
    own_len: int,
    output_len: int,
) -> BenchRequest:
    token_ids = np.concatenate([prefix, vocabulary.draw(rng, own_len)])
    prompt, num_tokens = vocabulary.prompt(token_ids, rng)
    return BenchRequest(prompt, num_tokens, output_len)
