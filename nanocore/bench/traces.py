"""Datasets that are recorded traffic: when requests came, how long they were, and what they shared.

`timed_trace` and `mooncake` are JSON lines {timestamp, input_length, output_length, hash_ids}; a
hash id stands for a block of tokens, so equal ids give equal tokens: token i of block h is a
function of (seed, h, i), of a block that is cut as of a whole one. What no hash id covers is each
request's own. `azure` is a CSV of TIMESTAMP, ContextTokens, GeneratedTokens. Times begin with the
first request's.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final

import numpy as np

from nanocore.bench.dataset_options import AZURE, MOONCAKE, DatasetOptions
from nanocore.bench.files import DatasetFile
from nanocore.bench.outcome import BenchRequest
from nanocore.bench.vocabulary import TokenIds, Vocabulary

MOONCAKE_BLOCK_TOKENS: Final = 512
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BLOCK, _OWN = 1, 2  # kinds of tokens, which no seed mixes


@dataclass(frozen=True, slots=True)
class TraceRow:
    """time_s: by the trace's own clock. hash_ids: of the blocks that begin the prompt."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


def trace_requests(options: DatasetOptions, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The first requests of a trace, in the order of their times.

    Raises:
        ConfigError: the file is no such trace, or has no request.
    """
    file = DatasetFile(options.dataset_path or "")
    is_mooncake = options.dataset_name == MOONCAKE
    unit_s = options.timed_trace_sec_multiplier
    if unit_s is None:
        unit_s = 1e-3 if is_mooncake else 1.0
    block_tokens = options.timed_trace_chunk_hash_size
    if block_tokens is None:
        block_tokens = MOONCAKE_BLOCK_TOKENS if is_mooncake else 16
    read = _azure_rows if options.dataset_name == AZURE else _json_rows
    rows = list(islice(read(file), options.num_prompts))
    if not rows:
        file.refuse("there is no request in it")
    rows.sort(key=lambda row: row.time_s)
    prompts = BlockPrompts(vocabulary, block_tokens, options.seed)
    requests = []
    for index, row in enumerate(rows):
        token_ids = prompts.make(index, row)
        rng = np.random.default_rng([options.seed, _OWN, index])
        prompt, num_tokens = vocabulary.prompt(token_ids, rng)
        arrival_s = (row.time_s - rows[0].time_s) * unit_s
        requests.append(BenchRequest(prompt, num_tokens, row.num_output_tokens, arrival_s))
    return requests


class BlockPrompts:
    """Prompts of blocks that have names."""

    def __init__(self, vocabulary: Vocabulary, block_tokens: int, seed: int) -> None:
        self._vocabulary, self._block_tokens, self._seed = vocabulary, block_tokens, seed
        self._blocks: dict[int, TokenIds] = {}

    def make(self, index: int, row: TraceRow) -> TokenIds:
        """Of the row of this index."""
        parts = [self._block(hash_id) for hash_id in row.hash_ids]
        missing = max(0, row.num_prompt_tokens - len(parts) * self._block_tokens)
        own = np.random.default_rng([self._seed, _OWN, index])
        parts.append(self._vocabulary.draw(own, missing))
        return np.concatenate(parts)[: row.num_prompt_tokens]

    def _block(self, hash_id: int) -> TokenIds:
        block = self._blocks.get(hash_id)
        if block is None:
            rng = np.random.default_rng([self._seed, _BLOCK, hash_id])
            block = self._blocks[hash_id] = self._vocabulary.draw(rng, self._block_tokens)
        return block


def _json_rows(file: DatasetFile) -> Iterator[TraceRow]:
    for line, row in file.json_lines():
        time_s, hash_ids = row.get("timestamp"), row.get("hash_ids", [])
        if not isinstance(time_s, (int, float)) or isinstance(time_s, bool):
            file.refuse(f"timestamp is {time_s!r}: a number", line)
        if not isinstance(hash_ids, list):
            file.refuse(f"hash_ids is {hash_ids!r}: a list of whole numbers", line)
        yield TraceRow(
            time_s,
            file.count(row.get("input_length"), "input_length", line, least=1),
            file.count(row.get("output_length"), "output_length", line, least=1),
            tuple(file.count(each, "a hash id", line) for each in hash_ids),
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
            file.count(lengths[0], "ContextTokens", rows.line_num, least=1),
            file.count(lengths[1], "GeneratedTokens", rows.line_num, least=1),
        )
