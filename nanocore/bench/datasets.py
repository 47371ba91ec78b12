"""Datasets by name, for any target; text datasets are read here.

In `sharegpt` (a JSON file of conversations) and `custom` (JSON lines) the first turn of a
conversation is the prompt, and the second one gives the output length. As in `vllm bench`, very
short and very long conversations are left out; the others are shuffled by the seed, and repeated if
there are fewer than requested.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import msgspec

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
from nanocore.bench.synthetic import (
    PromptVocabulary,
    prefix_repetition_requests,
    random_requests,
    trace_requests,
)
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Kinds of prompts that a target takes.

    tokenizer, vocab_size, eos_token_ids: the model's, if known. takes_text: prompts are sent as
    texts, else as token ids. takes_token_ids: they can be sent as token ids. has_template: prompts
    become messages in this process.
    """

    tokenizer: Tokenizer | None
    takes_text: bool
    takes_token_ids: bool = True
    has_template: bool = True
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def vocabulary(self, as_text: bool) -> PromptVocabulary:
        """Return the vocabulary of random prompts; raises ConfigError if it is unknown."""
        if self.tokenizer is not None:
            return PromptVocabulary.of_tokenizer(self.tokenizer, as_text, self.vocab_size)
        if self.vocab_size is None:
            raise ConfigError(
                "random prompts need a tokenizer, which this server does not give: name a folder, "
                "a tokenizer.json or a GGUF file with --tokenizer, or an engine with "
                "--engine-endpoint"
            )
        return PromptVocabulary.of_size(self.vocab_size, self.eos_token_ids)


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
    encoding = TextEncoding(source.tokenizer, source.takes_text)
    if name == SHAREGPT:
        return sharegpt_requests(options, encoding)
    if name == CUSTOM:
        return custom_requests(options, encoding, source.has_template)
    if name == RANDOM:
        return random_requests(options, source.vocabulary(source.takes_text))
    if name == PREFIX_REPETITION:
        return prefix_repetition_requests(options, source.vocabulary(source.takes_text))
    if not source.takes_token_ids:
        raise ConfigError(
            f"--dataset-name {name} has token ids, which chat endpoints do not take: use "
            "--backend openai or nanocore"
        )
    return trace_requests(options, source.vocabulary(as_text=False))


MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_TOTAL_TOKENS: Final = 2048
Row = TypeVar("Row")


class _Message(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Message] = []


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """Sends texts as they are, or as token ids. tokenizer: None if unknown."""

    tokenizer: Tokenizer | None
    as_text: bool

    def prompt(self, text: str, is_chat: bool) -> tuple[Prompt, int | None]:
        """Return a prompt, and its number of tokens.

        is_chat: apply the chat template to a user message, and send token ids.

        Raises:
            ConfigError: this needs a tokenizer or a template.
        """
        if self.tokenizer is None:
            if not self.as_text:
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
        if self.as_text and not is_chat:
            return text, len(ids)
        return array("i", ids), len(ids)


def sharegpt_requests(options: DatasetOptions, encoding: TextEncoding) -> list[BenchRequest]:
    """Read a file in the format of ShareGPT_V3."""
    file = DatasetFile(options.dataset_path or "")
    try:
        entries = msgspec.json.decode(file.read(), type=list[_Conversation])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        file.refuse(f"not a list of objects with `conversations`: {error}")
    entries = [entry for entry in entries if len(entry.conversations) >= 2]
    fixed = options.sharegpt_output_len
    if encoding.tokenizer is None and fixed is None:
        raise ConfigError(
            "output lengths need a tokenizer: name one with --tokenizer, or give "
            "--sharegpt-output-len"
        )

    def rows() -> Iterator[BenchRequest]:
        for entry in _shuffled(entries, options):
            question, response = (message.value for message in entry.conversations[:2])
            prompt, num_tokens = encoding.prompt(question, is_chat=False)
            num_output = fixed
            if num_output is None:
                assert encoding.tokenizer is not None, "checked above"
                num_output = len(encoding.tokenizer.encode(response))
                if num_output < MIN_TOKENS:
                    continue
            if num_tokens is None or (
                MIN_TOKENS <= num_tokens <= MAX_PROMPT_TOKENS
                and num_tokens + num_output <= MAX_TOTAL_TOKENS
            ):
                yield BenchRequest(prompt, num_tokens, num_output)

    return _sampled(rows(), options, file)


def custom_requests(
    options: DatasetOptions, encoding: TextEncoding, has_template: bool
) -> list[BenchRequest]:
    """Read lines such as {"prompt": "...", "output_tokens": 10}.

    has_template: whether prompts become messages here; chat endpoints do so themselves.
    """
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
            is_chat = has_template and not options.skip_chat_template
            prompt, num_tokens = encoding.prompt(text, is_chat)
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
