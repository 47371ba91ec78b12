"""Datasets by name, for any target. The same options, tokens and seed give the same requests.

In `sharegpt` (a JSON file of conversations) and `custom` (JSON lines) the first turn of a
conversation is the prompt, and the second one gives the output length. As in `vllm bench`, very
short and very long conversations are left out; the others are shuffled by the seed, and repeated if
there are fewer than requested.

`timed_trace` has arrival times and lengths: JSON lines {timestamp, input_length, output_length,
hash_ids}. A hash id stands for a block of tokens; equal ids give equal tokens, also in a block that
is cut: token i of block h is a function of (seed, h, i). Tokens beyond the hash ids are unique.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from nanocore.bench.dataset_options import (
    CUSTOM,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    SYNTHETIC,
    DatasetFile,
    DatasetOptions,
)
from nanocore.bench.load import BenchRequest, Prompt
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, InvalidRequestError
from nanocore.protocol.messages import ModelCard

TokenIds = npt.NDArray[np.int32]
_MAX_ATTEMPTS: Final = 10
_BLOCK, _OWN = 1, 2  # parts of seeds: for blocks and for single requests


MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_TOTAL_TOKENS: Final = 2048
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Kinds of prompts that a target takes.

    tokenizer, vocab_size, eos_token_ids: the model's, if known. takes_text: prompts are sent as
    texts, else as token ids. takes_token_ids: they can be sent as token ids. has_template: prompts
    become messages in this process; chat endpoints do so themselves.
    """

    tokenizer: Tokenizer | None
    takes_text: bool
    takes_token_ids: bool = True
    has_template: bool = True
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of_engine(cls, tokenizer: Tokenizer | None, card: ModelCard) -> Self:
        """Return the source for an engine, which takes token ids."""
        eos_token_ids = tuple(card.eos_token_ids)
        return cls(tokenizer, False, vocab_size=card.vocab_size, eos_token_ids=eos_token_ids)

    def prompt(self, text: str, is_chat: bool) -> tuple[Prompt, int | None]:
        """Return a prompt, and its number of tokens; None if it is unknown.

        is_chat: apply the chat template to a user message, and send token ids.

        Raises:
            ConfigError: this needs a tokenizer or a template.
        """
        if self.tokenizer is None:
            if not self.takes_text:
                raise ConfigError(
                    "the model has no tokenizer: name one with --tokenizer, or use a dataset of "
                    "token ids"
                )
            if is_chat:
                raise ConfigError(
                    "the chat template needs a tokenizer: name one with --tokenizer, or send "
                    "prompts as they are with --skip-chat-template"
                )
            return text, None
        try:
            if is_chat:
                ids = self.tokenizer.encode_chat([{"role": "user", "content": text}])
            else:
                ids = self.tokenizer.encode(text)
        except InvalidRequestError as error:
            remedy = ", or add --skip-chat-template" if is_chat else ""
            raise ConfigError(f"{error}{remedy}") from None
        if self.takes_text and not is_chat:
            return text, len(ids)
        return array("i", ids), len(ids)


def check_file(options: DatasetOptions) -> None:
    """Raise ConfigError if a dataset needs a file and has none, or the other way around."""
    name = options.dataset_name
    if (options.dataset_path is None) != (name in SYNTHETIC):
        need = "takes no file" if name in SYNTHETIC else "needs its file, as --dataset-path FILE"
        raise ConfigError(f"--dataset-name {name} {need}")


def load_requests(options: DatasetOptions, source: PromptSource) -> list[BenchRequest]:
    """Return the requests of a dataset in sending order.

    Raises:
        ConfigError: the options, the file and the target do not fit together.
    """
    check_file(options)
    name = options.dataset_name
    if name == SHAREGPT:
        return sharegpt_requests(options, source)
    if name == CUSTOM:
        return custom_requests(options, source)
    if name == RANDOM:
        return random_requests(options, PromptVocabulary(source, source.takes_text))
    if name == PREFIX_REPETITION:
        return prefix_repetition_requests(options, PromptVocabulary(source, source.takes_text))
    if not source.takes_token_ids:
        raise ConfigError(
            f"--dataset-name {name} has token ids, which chat endpoints do not take: use "
            "--backend openai or nanocore"
        )
    return trace_requests(options, PromptVocabulary(source, as_text=False))


class PromptVocabulary:
    """Token ids to draw prompts from. Special tokens are left out: they may end a response.

    as_text: whether `prompt` returns texts, or token ids.

    Raises:
        ConfigError: the vocabulary is unknown, or has special tokens only.
    """

    def __init__(self, source: PromptSource, as_text: bool) -> None:
        size = source.vocab_size
        if source.tokenizer is not None:
            backend = source.tokenizer.backend
            known = set(backend.get_vocab(with_added_tokens=True).values())
            ids = known - backend.get_added_tokens_decoder().keys()
        elif size is not None:
            ids = set(range(size)).difference(source.eos_token_ids)
        else:
            raise ConfigError(
                "random prompts need a tokenizer, which this server does not give: name a folder, "
                "a tokenizer.json or a GGUF file with --tokenizer, or an engine with "
                "--engine-endpoint"
            )
        drawn = sorted(token_id for token_id in ids if size is None or token_id < size)
        if not drawn:
            raise ConfigError("the vocabulary has special tokens only: no prompt can be drawn")
        self._token_ids = np.array(drawn, dtype=np.int32)
        self._tokenizer = source.tokenizer
        self._as_text = as_text

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
    block_tokens = options.timed_trace_chunk_hash_size
    rows = list(islice(_trace_rows(file), options.num_prompts))
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
        arrival_s = (row.time_s - rows[0].time_s) * options.timed_trace_sec_multiplier
        requests.append(BenchRequest(prompt, num_tokens, row.num_output_tokens, arrival_s))
    return requests


def _trace_rows(file: DatasetFile) -> Iterator[TraceRow]:
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


class _Message(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Message] = []


def sharegpt_requests(options: DatasetOptions, source: PromptSource) -> list[BenchRequest]:
    """Read a file in the format of ShareGPT_V3."""
    file = DatasetFile(options.dataset_path or "")
    try:
        entries = msgspec.json.decode(file.read(), type=list[_Conversation])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        file.refuse(f"not a list of objects with `conversations`: {error}")
    entries = [entry for entry in entries if len(entry.conversations) >= 2]
    fixed = options.sharegpt_output_len
    if source.tokenizer is None and fixed is None:
        raise ConfigError(
            "output lengths need a tokenizer: name one with --tokenizer, or give "
            "--sharegpt-output-len"
        )

    def rows() -> Iterator[BenchRequest]:
        for entry in _shuffled(entries, options):
            question, response = (message.value for message in entry.conversations[:2])
            prompt, num_tokens = source.prompt(question, is_chat=False)
            num_output = fixed
            if num_output is None:
                assert source.tokenizer is not None, "checked above"
                num_output = len(source.tokenizer.encode(response))
                if num_output < MIN_TOKENS:
                    continue
            if num_tokens is None or (
                MIN_TOKENS <= num_tokens <= MAX_PROMPT_TOKENS
                and num_tokens + num_output <= MAX_TOTAL_TOKENS
            ):
                yield BenchRequest(prompt, num_tokens, num_output)

    return _sampled(rows(), options, file)


def custom_requests(options: DatasetOptions, source: PromptSource) -> list[BenchRequest]:
    """Read lines such as {"prompt": "...", "output_tokens": 10}."""
    file = DatasetFile(options.dataset_path or "")

    def rows() -> Iterator[BenchRequest]:
        for line, row in _shuffled(list(file.json_lines()), options):
            text, num_output = row.get("prompt"), options.custom_output_len
            if not isinstance(text, str):
                file.refuse('"prompt" is missing, or not a text', line)
            if num_output is None:
                if "output_tokens" not in row:
                    file.refuse('"output_tokens" is missing: give --custom-output-len', line)
                num_output = file.integer(row["output_tokens"], "output_tokens", line, least=1)
            is_chat = source.has_template and not options.skip_chat_template
            prompt, num_tokens = source.prompt(text, is_chat)
            yield BenchRequest(prompt, num_tokens, num_output)

    return _sampled(rows(), options, file)


def _shuffled(rows: list[Row], options: DatasetOptions) -> list[Row]:
    if options.disable_shuffle:
        return rows
    return random.Random(options.seed).sample(rows, len(rows))


def _sampled(
    rows: Iterator[BenchRequest], options: DatasetOptions, file: DatasetFile
) -> list[BenchRequest]:
    """Return the first rows, and random repetitions if there are too few."""
    requests = list(islice(rows, options.num_prompts))
    if not requests:
        file.refuse("it has no usable row")
    num_missing = options.num_prompts - len(requests)
    if options.no_oversample or not num_missing:
        return requests
    return requests + random.Random(options.seed).choices(requests, k=num_missing)
