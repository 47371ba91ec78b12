"""Datasets by name, for any target."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.bench.dataset_options import (
    CUSTOM,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    SYNTHETIC,
    DatasetOptions,
)
from nanocore.bench.load import BenchRequest
from nanocore.bench.synthetic import (
    PromptVocabulary,
    prefix_repetition_requests,
    random_requests,
    trace_requests,
)
from nanocore.bench.text_datasets import TextEncoding, custom_requests, sharegpt_requests
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError


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
                "random prompts need a tokenizer: name its folder or its tokenizer.json with "
                "--tokenizer, or its engine with --engine-endpoint"
            )
        return PromptVocabulary.of_size(self.vocab_size, self.eos_token_ids)


def check_file(options: DatasetOptions) -> None:
    """Raise ConfigError if a dataset lacks its file, or has one that it does not need."""
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
