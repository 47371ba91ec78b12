"""What nanocore's client costs beside the model: from a step's frames to its readers' text.

CPU time, and not the clock on the wall, because other processes share the machine. The tokens are
those of a real text, by the tokenizer of the bundled demo model.
"""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Final

from overhead_engine import NUM_PROMPT_TOKENS, frozen_heap

from nanocore.client import SamplingParams
from nanocore.client.stream import RequestStream
from nanocore.client.stream_table import StreamTable
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import client_decoder, encode, pack_int32
from nanocore.protocol.messages import Accepted, Output

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


def demo_folder() -> Path:
    """The bundled demo model's folder."""
    return Path(str(resources.files("nanocore") / "demo_model"))


def client_us_per_token(num_streams: int, repeats: int) -> list[float]:
    """From the frames of an OUTPUT with one token for each stream to every stream's RequestOutput
    in the hands of its reader, without the event loop between them."""
    tokenizer = Tokenizer.from_folder(demo_folder())
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)

    def token(position: int) -> int:
        return text_ids[position % len(text_ids)]

    figures = []
    for _ in range(repeats):
        table = StreamTable()
        streams = []
        for handle in range(num_streams):
            prompt = [token(7 * handle + i) for i in range(NUM_PROMPT_TOKENS)]
            stream = RequestStream(
                f"r{handle}", None, prompt, SamplingParams(), tokenizer, leave=_no_leaving
            )
            table.add(stream)
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


def _read_steps(table: StreamTable, streams: list[RequestStream], steps: list[list[bytes]]) -> int:
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
