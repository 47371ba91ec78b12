"""What nanocore's wire and client cost: from a prompt to the engine, from a step to its readers.

submit_us            a request, from token ids in the client to the engine's numpy array
outputs_us           a step's OUTPUT of one token per request: encode, decode, unpack
client_us_per_token  from an OUTPUT's frames to the text that a reader gets of each stream

CPU time, and not the clock on the wall, because other processes share the machine. The client's
tokens are those of a real text, by the tokenizer of the demo model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from overhead_engine import NUM_PROMPT_TOKENS, VOCAB_SIZE, frozen_heap

from nanocore.client import SamplingParams
from nanocore.client.connection.request_table import OpenRequest, RequestTable
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.io.session import output_frames
from nanocore.engine_core.scheduling.columns import TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import (
    client_decoder,
    encode,
    engine_decoder,
    pack_int32,
    unpack_output,
)
from nanocore.protocol.messages import Accepted, Output, Submit

_REPEAT_NS: Final = 40_000_000
TEXT: Final = (
    "An engine keeps the keys and values of every token it has read. When two questions begin "
    "alike, the second one should not pay for the first part again: the blocks are hashed, found, "
    "and shared. In 2024 a busy server answered 1,250 requests per minute; today the same machine "
    "answers 4,800. Café, naïve, façade and 東京 need more than one byte per letter, so the "
    "decoder holds a token back until its bytes are whole. def step(self): return "
    "self.schedule() — and so on. "
)
"""Words, numbers, code, and letters of several bytes."""
_NUM_STEPS, _NUM_WARM_STEPS = 128, 8


def submit_us(num_tokens: int, repeats: int) -> list[float]:
    """A request of so many random tokens, from a list of them."""
    token_ids = random.Random(4).choices(range(VOCAB_SIZE), k=num_tokens)
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True)
    sampling = params.for_engine()
    decode = engine_decoder().decode

    def both_ways() -> Any:
        column = pack_int32(token_ids)
        submit = Submit(request_id="0" * 32, prompt_token_ids=column, sampling=sampling)
        received = decode(encode(submit))
        assert isinstance(received, Submit)
        return np.frombuffer(received.prompt_token_ids, np.dtype("<i4"))

    assert both_ways().tolist() == token_ids
    return _per_call_us(both_ways, repeats)


def outputs_us(num_requests: int, repeats: int) -> list[float]:
    """A step's output of one token per request."""
    numbers = np.arange(num_requests)
    tokens = TokenColumns(numbers.astype(np.uint32), numbers.astype(np.int32))
    decode = client_decoder().decode
    output = ClientOutput(1, tokens)  # as the step loop hands it over

    def both_ways() -> Any:
        (frames,) = output_frames(output)
        message = decode(frames)
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


def demo_folder() -> Path:
    """The demo model's folder."""
    return demo_model_folder()


def client_us_per_token(num_streams: int, repeats: int) -> list[float]:
    """From the frames of an OUTPUT with one token for each stream to every stream's RequestOutput
    in the hands of its reader, without the event loop between them."""
    tokenizer = Tokenizer.from_folder(demo_folder())
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)

    def token(position: int) -> int:
        return text_ids[position % len(text_ids)]

    figures = []
    for _ in range(repeats):
        table = RequestTable()
        streams = []
        for handle in range(num_streams):
            prompt = [token(7 * handle + i) for i in range(NUM_PROMPT_TOKENS)]
            stream = RequestStream(
                f"r{handle}", None, prompt, SamplingParams(), tokenizer, leave=_no_leaving
            )
            table.add(OpenRequest(stream))
            table.accept(Accepted(request_id=stream.request_id, handle=handle, seed=0))
            streams.append(stream)
        steps = [
            encode(
                Output(
                    handles=pack_int32(range(num_streams)),
                    tokens=pack_int32(
                        token(7 * handle + NUM_PROMPT_TOKENS + step)
                        for handle in range(num_streams)
                    ),
                )
            )
            for step in range(_NUM_WARM_STEPS + _NUM_STEPS)
        ]
        spent_ns = _read_steps(table, streams, steps)
        figures.append(spent_ns / 1e3 / _NUM_STEPS / num_streams)
    return figures


def _read_steps(table: RequestTable, streams: list[RequestStream], steps: list[list[bytes]]) -> int:
    """Nanoseconds that all steps but the first ones take; also checks what was read."""
    decode = client_decoder().decode
    start_ns = 0
    with frozen_heap():
        for number, frames in enumerate(steps):
            if number == _NUM_WARM_STEPS:
                start_ns = time.thread_time_ns()
            message = decode(frames)
            assert isinstance(message, Output)
            table.deliver(message)
            for stream in streams:
                output = stream.read()
                assert output is not None
                output.outputs[0].delta  # noqa: B018  what a reader takes
        spent_ns = time.thread_time_ns() - start_ns
    assert output is not None
    assert len(output.outputs[0].token_ids) == len(steps)
    assert len(output.outputs[0].text) > 1
    return spent_ns


def _no_leaving(stream: RequestStream) -> None:
    raise AssertionError(f"{stream.request_id} was left")
