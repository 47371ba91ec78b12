"""Datasets that are texts: `sharegpt` (a JSON file of conversations) and `custom` (JSON lines).

Of a conversation the first turn is the prompt, and the second one says how long an answer is. As
in `vllm bench`, very short and very long ones are left out, what is left is shuffled by the seed,
and repeated if there are fewer than asked for.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import msgspec

from nanocore.bench.dataset_options import DatasetOptions
from nanocore.bench.files import DatasetFile
from nanocore.bench.outcome import BenchRequest, Prompt
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, InvalidRequestError

MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_TOTAL_TOKENS: Final = 2048
Row = TypeVar("Row")


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


@dataclass(frozen=True, slots=True)
class TextForm:
    """How texts are sent: as they are, or as their token ids. tokenizer: None if there is none."""

    tokenizer: Tokenizer | None
    as_text: bool

    def prompt(self, text: str, is_chat: bool) -> tuple[Prompt, int | None]:
        """A prompt, and how many tokens it has.

        is_chat: it becomes a user's message by the chat template, and is sent as token ids.

        Raises:
            ConfigError: there is no tokenizer or no template for that.
        """
        if self.tokenizer is None:
            if not self.as_text:
                raise ConfigError(
                    "the model has no tokenizer: name one with --tokenizer, or take a dataset of "
                    "token ids"
                )
            if is_chat:
                raise ConfigError(
                    "the chat template needs a tokenizer: name one with --tokenizer, or send the "
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


def sharegpt_requests(options: DatasetOptions, form: TextForm) -> list[BenchRequest]:
    """Of a file as ShareGPT_V3 is.

    Raises:
        ConfigError: it is no such file, or none of its conversations is of use.
    """
    file = DatasetFile(options.dataset_path or "")
    try:
        entries = msgspec.json.decode(file.read(), type=list[_Conversation])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        file.refuse(f"no list of objects with `conversations`: {error}")
    entries = [entry for entry in entries if len(entry.conversations) >= 2]
    rows = _of_conversations(_shuffled(entries, options), options, form)
    return _so_many(rows, options, file)


def _of_conversations(
    entries: list[_Conversation], options: DatasetOptions, form: TextForm
) -> Iterator[BenchRequest]:
    fixed = options.sharegpt_output_len
    if form.tokenizer is None and fixed is None:
        raise ConfigError(
            "how long answers are is counted by a tokenizer: name one with --tokenizer, or give "
            "--sharegpt-output-len"
        )
    for entry in entries:
        question, answer = (turn.value for turn in entry.conversations[:2])
        prompt, num_tokens = form.prompt(question, is_chat=False)
        num_output = fixed
        if num_output is None:
            assert form.tokenizer is not None, "checked above"
            num_output = len(form.tokenizer.encode(answer))
            if num_output < MIN_TOKENS:
                continue
        if num_tokens is None or (
            MIN_TOKENS <= num_tokens <= MAX_PROMPT_TOKENS
            and num_tokens + num_output <= MAX_TOTAL_TOKENS
        ):
            yield BenchRequest(prompt, num_tokens, num_output)


def custom_requests(
    options: DatasetOptions, form: TextForm, has_template: bool
) -> list[BenchRequest]:
    """Of lines as {"prompt": "...", "output_tokens": 10}.

    has_template: whether prompts become messages here; a chat endpoint does so itself.

    Raises:
        ConfigError: a line is none, or has no length.
    """
    file = DatasetFile(options.dataset_path or "")
    rows = _shuffled(list(file.json_lines()), options)
    return _so_many(_of_lines(rows, options, form, has_template, file), options, file)


def _of_lines(
    rows: list[tuple[int, dict[str, object]]],
    options: DatasetOptions,
    form: TextForm,
    has_template: bool,
    file: DatasetFile,
) -> Iterator[BenchRequest]:
    for line, row in rows:
        text, num_output = row.get("prompt"), options.custom_output_len
        if not isinstance(text, str):
            file.refuse('it has no "prompt" that is a text', line)
        if num_output is None:
            if "output_tokens" not in row:
                file.refuse('it has no "output_tokens": give --custom-output-len', line)
            num_output = file.count(row["output_tokens"], "output_tokens", line, least=1)
        prompt, num_tokens = form.prompt(text, has_template and not options.skip_chat_template)
        yield BenchRequest(prompt, num_tokens, num_output)


def _shuffled(rows: list[Row], options: DatasetOptions) -> list[Row]:
    if options.disable_shuffle:
        return rows
    return random.Random(options.seed).sample(rows, len(rows))


def _so_many(
    rows: Iterator[BenchRequest], options: DatasetOptions, file: DatasetFile
) -> list[BenchRequest]:
    """The first ones, and if they are too few, some of them again."""
    requests = list(islice(rows, options.num_prompts))
    if not requests:
        file.refuse("no row of it can be a request")
    num_missing = options.num_prompts - len(requests)
    if options.no_oversample or not num_missing:
        return requests
    return requests + random.Random(options.seed).choices(requests, k=num_missing)
