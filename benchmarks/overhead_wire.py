"""What nanocore's wire costs: encoding and decoding, in CPU time.

submit_us   a request, from token ids in the client to the engine's numpy array
outputs_us  a step's OUTPUT of one token per request: encode, decode, unpack
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from nanocore.client import SamplingParams
from nanocore.engine_core.io.session import output_frames
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.codec import (
    client_decoder,
    encode,
    engine_decoder,
    pack_int32,
    unpack_output,
)
from nanocore.protocol.messages import Output, Submit

VOCAB_SIZE: Final = 151_936  # ids up to that of the largest vocabularies
_REPEAT_NS: Final = 40_000_000


def submit_us(
    num_tokens: int, repeats: int, kind: Callable[[list[int]], Any] = list
) -> list[float]:
    """A request of so many random tokens. kind: of the caller's sequence, a list or an array."""
    drawn = random.Random(4)
    token_ids = kind([drawn.randrange(VOCAB_SIZE) for _ in range(num_tokens)])
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True)
    sampling = params.for_engine()
    decode = engine_decoder().decode

    def both_ways() -> Any:
        column = pack_int32(token_ids)
        submit = Submit(request_id="0" * 32, prompt_token_ids=column, sampling=sampling)
        received = decode(encode(submit))
        assert isinstance(received, Submit)
        return np.frombuffer(received.prompt_token_ids, np.dtype("<i4"))

    assert both_ways().tolist() == list(token_ids)
    return _per_call_us(both_ways, repeats)


def as_int32_array(token_ids: list[int]) -> array[int]:
    """What a caller passes who has token ids in an array."""
    return array("i", token_ids)


def outputs_us(num_requests: int, repeats: int) -> list[float]:
    """A step's output of one token per request."""
    numbers = np.arange(num_requests)
    tokens = TokenColumns(numbers.astype(np.uint32), numbers.astype(np.int32))
    decode = client_decoder().decode

    def both_ways() -> Any:
        message = decode(output_frames(tokens, []))
        assert isinstance(message, Output)
        return unpack_output(message)

    return _per_call_us(both_ways, repeats)


def _per_call_us(call: Callable[[], Any], repeats: int) -> list[float]:
    """CPU microseconds per call; each repeat is long enough to swamp the timer."""
    for _ in range(3):
        call()
    start_ns = time.thread_time_ns()
    call()
    num_calls = max(3, min(20_000, _REPEAT_NS // max(1, time.thread_time_ns() - start_ns)))
    figures = []
    for _ in range(repeats):
        start_ns = time.thread_time_ns()
        for _ in range(num_calls):
            call()
        figures.append((time.thread_time_ns() - start_ns) / 1e3 / num_calls)
    return figures
