"""DatasetOptions, their flags (spelled as in `vllm bench`), and the dataset file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from nanocore.protocol.errors import ConfigError
from nanocore.system.flags import at_least, values_of

RANDOM, PREFIX_REPETITION = "random", "prefix_repetition"
SHAREGPT, CUSTOM, TIMED_TRACE = "sharegpt", "custom", "timed_trace"
SYNTHETIC: Final = (RANDOM, PREFIX_REPETITION)
DATASETS: Final = (RANDOM, SHAREGPT, CUSTOM, PREFIX_REPETITION, TIMED_TRACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Values of the flags of the same names.

    random_range_ratio: of input and output lengths, which are drawn from
    [length * (1 - ratio), length * (1 + ratio)]. timed_trace_chunk_hash_size: tokens per hash id.
    timed_trace_sec_multiplier: seconds per unit of a timestamp.
    """

    dataset_name: str = RANDOM
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: tuple[float, float] = (0.0, 0.0)
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    skip_chat_template: bool = False
    timed_trace_chunk_hash_size: int = 16
    timed_trace_sec_multiplier: float = 1.0
    disable_shuffle: bool = False
    no_oversample: bool = False


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    defaults = DatasetOptions()
    group = parser.add_argument_group("dataset")

    def add(name: str, least: int, text: str) -> None:
        default = getattr(defaults, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=at_least(least), default=default, metavar="N",
                           help=f"{text} (default: {default})")  # fmt: skip

    flag = group.add_argument
    flag("--dataset-name", choices=DATASETS, default=RANDOM,
         help=f"kind of the requests (default: {RANDOM})")  # fmt: skip
    flag("--dataset-path", metavar="FILE", help="file, for all but random and prefix_repetition")
    add("num-prompts", 1, "number of requests")
    add("seed", 0, "seed of prompts, lengths and arrivals")
    flag("--input-len", type=at_least(1), metavar="N", help="the same as --random-input-len")
    flag(
        "--output-len", type=at_least(1), metavar="N", help="for all but timed_trace: output tokens"
    )
    flag("--disable-shuffle", action="store_true", help="keep the order of the file")
    flag("--no-oversample", action="store_true",
         help="do not repeat rows if the file has too few")  # fmt: skip

    group = parser.add_argument_group("random and prefix_repetition")
    flag = group.add_argument
    add("random-input-len", 0, "prompt tokens without the prefix")
    add("random-output-len", 1, "output tokens")
    flag("--random-range-ratio", type=range_ratio, default=defaults.random_range_ratio, metavar="R",
         help='draw lengths from [len * (1 - R), len * (1 + R)]; or {"input": R, "output": R} '
         "(default: 0)")  # fmt: skip
    add("random-prefix-len", 0, "tokens of a prefix that all prompts share")
    add("prefix-repetition-prefix-len", 0, "tokens of a prefix")
    add("prefix-repetition-suffix-len", 0, "tokens after the prefix")
    add("prefix-repetition-num-prefixes", 1, "number of prefixes")
    add("prefix-repetition-output-len", 1, "output tokens")

    group = parser.add_argument_group("sharegpt, custom and timed_trace")
    flag = group.add_argument
    flag("--sharegpt-output-len", type=at_least(1), metavar="N",
         help="output tokens (default: those of the file)")  # fmt: skip
    flag("--custom-output-len", type=at_least(1), metavar="N",
         help='output tokens (default: "output_tokens" of the row)')  # fmt: skip
    flag("--skip-chat-template", action="store_true",
         help="send prompts of custom as they are, not as user messages")  # fmt: skip
    add("timed-trace-chunk-hash-size", 1, "tokens per hash id; Mooncake's traces have 512")
    flag("--timed-trace-sec-multiplier", type=above_zero, default=1.0, metavar="X",
         help="seconds per unit of a timestamp; Mooncake's is 0.001 (default: 1)")  # fmt: skip


def dataset_options(given: argparse.Namespace) -> DatasetOptions:
    values = values_of(DatasetOptions, given)
    if given.input_len is not None:
        values["random_input_len"] = given.input_len
    if given.output_len is not None:
        values |= {name: given.output_len for name in values if name.endswith("_output_len")}
    return DatasetOptions(**values)


def any_number(text: str) -> float:
    """Return a number, maybe infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def above_zero(text: str) -> float:
    value = any_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def range_ratio(text: str) -> tuple[float, float]:
    """Return ratios of input and output lengths."""
    try:
        value = msgspec.json.decode(text, type=float | dict[str, float])
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
    except (msgspec.MsgspecError, ValueError, KeyError):
        pair = (math.nan, math.nan)
    if all(0 <= ratio < 1 for ratio in pair):
        return pair
    raise argparse.ArgumentTypeError(
        f'{text!r}: a number from 0 to below 1, or {{"input": 0.3, "output": 0.5}}'
    )


class DatasetFile:
    """The file of --dataset-path. Errors are ConfigErrors that name the file and the line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except OSError as error:
            self.refuse(error.strerror or str(error))

    def json_lines(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield (line number, object), without empty lines."""
        for number, line in enumerate(self.read().splitlines(), 1):
            if line.strip():
                try:
                    yield number, msgspec.json.decode(line, type=dict[str, object])
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    self.refuse(f"{error}", number)

    def refuse(self, problem: str, line: int | None = None) -> NoReturn:
        where = "" if line is None else f", line {line}"
        raise ConfigError(f"--dataset-path {self.path}{where}: {problem}")

    def integer(self, value: object, name: str, line: int, least: int = 0) -> int:
        """Return a value that is an integer >= least."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(f"{name} is {value!r}: an integer >= {least}", line)
        return value
