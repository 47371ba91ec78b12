"""The flags of datasets, spelled as `vllm bench` spells them, and what they come to."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Final

from nanocore.bench.dataset_options import DATASETS, RANDOM, DatasetOptions
from nanocore.bench.parser import above_zero, at_least, range_ratio

_DEFAULTS: Final = DatasetOptions()
_INPUT_LENS: Final = ("random_input_len",)
_OUTPUT_LENS: Final = (
    "random_output_len",
    "sharegpt_output_len",
    "custom_output_len",
    "prefix_repetition_output_len",
)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """To a parser of a benchmark."""
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default=RANDOM,
        help="mooncake is a timed_trace of milliseconds and 512 tokens per hash id "
        f"(default: {RANDOM})")  # fmt: skip
    add("--dataset-path", metavar="FILE", help="of all but random and prefix_repetition")
    add("--num-prompts", type=at_least(1), default=_DEFAULTS.num_prompts, metavar="N",
        help=f"how many requests (default: {_DEFAULTS.num_prompts})")  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N",
        help="of what is drawn: prompts, lengths, arrivals (default: 0)")  # fmt: skip
    add("--input-len", type=at_least(1), metavar="N", help="the same as --random-input-len")
    add("--output-len", type=at_least(1), metavar="N", help="of any dataset but a trace")
    add("--disable-shuffle", action="store_true", help="keep the order of the file")
    add("--no-oversample", action="store_true",
        help="do not repeat rows of a file that has too few")  # fmt: skip
    _add_drawn(parser)
    _add_files(parser)


def _add_drawn(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random and prefix_repetition")

    def add(name: str, least: int, text: str) -> None:
        default = getattr(_DEFAULTS, name)
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=at_least(least), default=default, metavar="N",
                           help=f"{text} (default: {default})")  # fmt: skip

    add("random_input_len", 0, "tokens of a prompt, without its prefix")
    add("random_output_len", 1, "tokens of an answer")
    group.add_argument(
        "--random-range-ratio",
        type=range_ratio,
        default=_DEFAULTS.random_range_ratio,
        metavar="R",
        help="lengths are drawn from [len * (1 - R), len * (1 + R)]; or "
        '{"input": R, "output": R} (default: 0)',
    )
    add("random_prefix_len", 0, "tokens that begin all prompts")
    add("prefix_repetition_prefix_len", 0, "tokens of a prefix")
    add("prefix_repetition_suffix_len", 0, "tokens of what follows it")
    add("prefix_repetition_num_prefixes", 1, "how many prefixes")
    add("prefix_repetition_output_len", 1, "tokens of an answer")


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sharegpt, custom and traces").add_argument
    add("--sharegpt-output-len", type=at_least(1), metavar="N",
        help="tokens of an answer (default: as in the file)")  # fmt: skip
    add("--custom-output-len", type=at_least(1), metavar="N",
        help='tokens of an answer (default: "output_tokens" of the row)')  # fmt: skip
    add("--skip-chat-template", action="store_true",
        help="send prompts of custom as they are, and not as a user's message")  # fmt: skip
    add("--timed-trace-chunk-hash-size", type=at_least(1), metavar="N",
        help="tokens that a hash id stands for (default: 16; of mooncake 512)")  # fmt: skip
    add("--timed-trace-sec-multiplier", type=above_zero, metavar="X",
        help="seconds per unit of its timestamps (default: 1; of mooncake 0.001)")  # fmt: skip


def dataset_options(given: argparse.Namespace) -> DatasetOptions:
    """What was asked for."""
    values = {each.name: getattr(given, each.name) for each in fields(DatasetOptions)}
    for length, names in ((given.input_len, _INPUT_LENS), (given.output_len, _OUTPUT_LENS)):
        if length is not None:
            values |= dict.fromkeys(names, length)
    return DatasetOptions(**values)
