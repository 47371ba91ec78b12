"""What a dataset is to be: the values of the flags that `vllm bench` has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RANDOM, PREFIX_REPETITION = "random", "prefix_repetition"
SHAREGPT, CUSTOM = "sharegpt", "custom"
TIMED_TRACE, MOONCAKE, AZURE = "timed_trace", "mooncake", "azure"
SYNTHETIC: Final = (RANDOM, PREFIX_REPETITION)
TRACES: Final = (TIMED_TRACE, MOONCAKE, AZURE)
DATASETS: Final = (RANDOM, SHAREGPT, CUSTOM, PREFIX_REPETITION, *TRACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """The fields are named as the flags.

    random_range_ratio: of input and output lengths, each of which is drawn from
    [length * (1 - ratio), length * (1 + ratio)]. timed_trace_chunk_hash_size: tokens that a hash id
    of a trace stands for; None is the format's own. timed_trace_sec_multiplier: seconds per unit of
    its timestamps, likewise.
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
    timed_trace_chunk_hash_size: int | None = None
    timed_trace_sec_multiplier: float | None = None
    disable_shuffle: bool = False
    no_oversample: bool = False
