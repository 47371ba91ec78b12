"""Datasets of random tokens: `random`, `prefix_repetition`, and traces of recorded traffic.

Traces have arrival times and lengths. `timed_trace` and `mooncake` are JSON lines {timestamp,
input_length, output_length, hash_ids}; a hash id stands for a block of tokens, and equal ids give
equal tokens, also in a block that is cut: token i of block h is a function of (seed, h, i). Tokens
beyond the hash ids are unique. `azure` is a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

The same options, vocabulary and seed give the same requests.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from nanocore.bench.dataset_options import AZURE, MOONCAKE, DatasetFile, DatasetOptions
from nanocore.bench.load import BenchRequest, Prompt
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError

TokenIds = npt.NDArray[np.int32]
MOONCAKE_BLOCK_TOKENS: Final = 512
_MAX_ATTEMPTS: Final = 10
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BLOCK, _OWN = 1, 2  # parts of seeds: for blocks and for single requests


class PromptVocabulary:
    """Token ids to draw prompts from. Special tokens are left out: they may end a response.

    Args:
        token_ids: ascending.
        tokenizer: None if prompts need no text.
        as_text: whether `prompt` returns texts, or token ids.
    """

    def __init__(self, token_ids: TokenIds, tokenizer: Tokenizer | None, as_text: bool) -> None:
        if not len(token_ids):
            raise ConfigError("the vocabulary has special tokens only: no prompt can be drawn")
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._as_text = as_text

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, as_text: bool, below: int | None = None) -> Self:
        """Take all tokens except added ones, which include the special ones.

        below: size of the model's vocabulary, if known.
        """
        backend = tokenizer.backend
        added = backend.get_added_tokens_decoder()
        known = backend.get_vocab(with_added_tokens=True).values()
        ids = sorted(
            token_id
            for token_id in set(known)
            if token_id not in added and (below is None or token_id < below)
        )
        return cls(np.array(ids, dtype=np.int32), tokenizer, as_text)

    @classmethod
    def of_size(cls, size: int, without: Collection[int]) -> Self:
        """Take all token ids below `size` except these, for a model without a tokenizer."""
        ids = np.setdiff1d(np.arange(size, dtype=np.int32), np.array([*without], dtype=np.int32))
        return cls(ids, None, as_text=False)

    @property
    def num_added_tokens(self) -> int:
        """Special tokens that a server's tokenizer adds to a text."""
        if self._tokenizer is None or not self._as_text:
            return 0
        return sum(self._tokenizer.num_added_tokens)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> TokenIds:
        """Return uniformly drawn token ids."""
        return self._token_ids[rng.integers(0, len(self._token_ids), num_tokens)]

    def prompt(self, token_ids: TokenIds, rng: np.random.Generator) -> tuple[Prompt, int]:
        """Return a prompt of these tokens, and the number of tokens that a server will count.

        Decoded random tokens may be encoded to other tokens, so a text is cut or extended until
        the number is right. After some attempts the number may still differ.
        """
        if not self._as_text:
            return array("i", token_ids.tobytes()), len(token_ids)
        assert self._tokenizer is not None, "texts are made by a tokenizer"
        wanted, text, found = len(token_ids), "", token_ids
        for _ in range(_MAX_ATTEMPTS):
            text = self._tokenizer.decode(found.tolist(), skip_special_tokens=False)
            found = np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
            if len(found) == wanted:
                break
            if len(found) > wanted:
                found = found[:wanted]
            else:
                found = np.concatenate([found, self.draw(rng, wanted - len(found))])
        else:
            text = self._tokenizer.decode(found.tolist(), skip_special_tokens=False)
            found = np.array(self._tokenizer.encode(text, add_special_tokens=False))
        return text, len(found) + self.num_added_tokens


def random_requests(options: DatasetOptions, vocabulary: PromptVocabulary) -> list[BenchRequest]:
    """Draw prompts with one common prefix, and lengths uniform around the given ones."""
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
    options: DatasetOptions, vocabulary: PromptVocabulary
) -> list[BenchRequest]:
    """Draw prompts, the same number for each of several prefixes."""
    num_prefixes, num_prompts = options.prefix_repetition_num_prefixes, options.num_prompts
    prefix_len = options.prefix_repetition_prefix_len
    suffix_len = options.prefix_repetition_suffix_len
    if num_prompts < num_prefixes:
        raise ConfigError(
            f"--num-prompts {num_prompts} is less than --prefix-repetition-num-prefixes "
            f"{num_prefixes}: each prefix needs at least one prompt"
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
    vocabulary: PromptVocabulary,
    rng: np.random.Generator,
    prefix: TokenIds,
    own_len: int,
    output_len: int,
) -> BenchRequest:
    token_ids = np.concatenate([prefix, vocabulary.draw(rng, own_len)])
    prompt, num_tokens = vocabulary.prompt(token_ids, rng)
    return BenchRequest(prompt, num_tokens, output_len)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """time_s: in the trace's unit. hash_ids: of the blocks that begin the prompt."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


def trace_requests(options: DatasetOptions, vocabulary: PromptVocabulary) -> list[BenchRequest]:
    """Return the first requests of a trace, in order of arrival."""
    file = DatasetFile(options.dataset_path or "")
    is_mooncake = options.dataset_name == MOONCAKE
    unit_s = options.timed_trace_sec_multiplier or (1e-3 if is_mooncake else 1.0)
    block_tokens = options.timed_trace_chunk_hash_size
    block_tokens = block_tokens or (MOONCAKE_BLOCK_TOKENS if is_mooncake else 16)
    read = _azure_rows if options.dataset_name == AZURE else _json_rows
    rows = list(islice(read(file), options.num_prompts))
    if not rows:
        file.refuse("it has no request")
    rows.sort(key=lambda row: row.time_s)
    blocks: dict[int, TokenIds] = {}
    requests = []
    for index, row in enumerate(rows):
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                rng = np.random.default_rng([options.seed, _BLOCK, hash_id])
                blocks[hash_id] = vocabulary.draw(rng, block_tokens)
        rng = np.random.default_rng([options.seed, _OWN, index])
        num_own = max(0, row.num_prompt_tokens - len(row.hash_ids) * block_tokens)
        parts = [*(blocks[hash_id] for hash_id in row.hash_ids), vocabulary.draw(rng, num_own)]
        token_ids = np.concatenate(parts)[: row.num_prompt_tokens]
        prompt, num_tokens = vocabulary.prompt(token_ids, rng)
        arrival_s = (row.time_s - rows[0].time_s) * unit_s
        requests.append(BenchRequest(prompt, num_tokens, row.num_output_tokens, arrival_s))
    return requests


def _json_rows(file: DatasetFile) -> Iterator[TraceRow]:
    for line, row in file.json_lines():
        time_s, hash_ids = row.get("timestamp"), row.get("hash_ids", [])
        if not isinstance(time_s, (int, float)) or isinstance(time_s, bool):
            file.refuse(f"timestamp is {time_s!r}: a number", line)
        if not isinstance(hash_ids, list):
            file.refuse(f"hash_ids is {hash_ids!r}: a list of integers", line)
        yield TraceRow(
            time_s,
            file.integer(row.get("input_length"), "input_length", line, least=1),
            file.integer(row.get("output_length"), "output_length", line, least=1),
            tuple(file.integer(each, "a hash id", line) for each in hash_ids),
        )


def _azure_rows(file: DatasetFile) -> Iterator[TraceRow]:
    rows = csv.DictReader(file.read().decode("utf-8-sig", "replace").splitlines())
    missing = [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        file.refuse(f"it has no column {', '.join(missing)}", 1)
    for row in rows:
        time, num_input, num_output = (row[name] or "" for name in _AZURE_COLUMNS)
        try:
            time_s = datetime.fromisoformat(time).timestamp()
            lengths = int(num_input), int(num_output)
        except ValueError as error:
            file.refuse(str(error), rows.line_num)
        yield TraceRow(
            time_s,
            file.integer(lengths[0], "ContextTokens", rows.line_num, least=1),
            file.integer(lengths[1], "GeneratedTokens", rows.line_num, least=1),
        )
