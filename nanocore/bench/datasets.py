"""A dataset's requests by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanocore.bench.conversations import TextForm, custom_requests, sharegpt_requests
from nanocore.bench.dataset_options import (
    CUSTOM,
    RANDOM,
    SHAREGPT,
    SYNTHETIC,
    DatasetOptions,
)
from nanocore.bench.outcome import BenchRequest
from nanocore.bench.synthetic import prefix_repetition_requests, random_requests
from nanocore.bench.traces import trace_requests
from nanocore.bench.vocabulary import Vocabulary
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What a target takes.

    tokenizer: the model's, if there is one. vocab_size, eos_token_ids: the model's, if known.
    takes_text: it is sent texts; token ids otherwise. takes_token_ids: it can be sent them.
    has_template: texts of a dataset become messages on our side.
    """

    tokenizer: Tokenizer | None
    takes_text: bool
    takes_token_ids: bool = True
    has_template: bool = True
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def vocabulary(self, as_text: bool) -> Vocabulary:
        """What prompts are drawn from.

        Raises:
            ConfigError: nobody knows.
        """
        if self.tokenizer is not None:
            return Vocabulary.of_tokenizer(self.tokenizer, as_text, self.vocab_size)
        if self.vocab_size is None:
            raise ConfigError(
                "prompts of so many tokens need the model's tokenizer: name its folder or its "
                "tokenizer.json with --tokenizer, or its engine with --engine-endpoint"
            )
        return Vocabulary.of_size(self.vocab_size, self.eos_token_ids)


def check_file(options: DatasetOptions) -> None:
    """Raises ConfigError unless there is a file where one is needed, and none elsewhere."""
    name = options.dataset_name
    if (options.dataset_path is None) != (name in SYNTHETIC):
        need = "takes no file" if name in SYNTHETIC else "needs its file, as --dataset-path FILE"
        raise ConfigError(f"--dataset-name {name} {need}")


def load_requests(options: DatasetOptions, source: PromptSource) -> list[BenchRequest]:
    """The requests of a dataset, in the order in which they are sent.

    Raises:
        ConfigError: the options, the file or the target cannot give them.
    """
    check_file(options)
    name = options.dataset_name
    if name in (SHAREGPT, CUSTOM):
        form = TextForm(source.tokenizer, source.takes_text)
        if name == SHAREGPT:
            return sharegpt_requests(options, form)
        return custom_requests(options, form, source.has_template)
    if name in SYNTHETIC:
        make: Callable[[DatasetOptions, Vocabulary], list[BenchRequest]] = (
            random_requests if name == RANDOM else prefix_repetition_requests
        )
        return make(options, source.vocabulary(source.takes_text))
    if not source.takes_token_ids:
        raise ConfigError(
            f"--dataset-name {name} is of token ids, which a chat endpoint does not take: use "
            "--backend openai or nanocore"
        )
    return trace_requests(options, source.vocabulary(as_text=False))
