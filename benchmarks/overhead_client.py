"""What nanocore costs beside the model: wire and client, in microseconds of CPU time.

    python benchmarks/overhead_client.py [--repeats 9]

Each function measures one thing and returns one figure per repeat. CPU time, and not the clock on
the wall, because other processes share the machine. Nothing here needs a model: the tokens are
those of a real text, by the tokenizer of the bundled demo model or of any other folder.

client_us_per_token   from the frames of an OUTPUT with one token for each stream to every stream's
                      RequestOutput in the hands of its reader, without the event loop between them
outputs_us            a step's OUTPUT: encode in the engine, decode and unpack in the client
submit_us             a SUBMIT: token ids to column, encode, decode
both_processes        a client and an engine process whose executor answers every step at once
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from sample_text import TEXT, demo_folder

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.stream import RequestStream
from nanocore.client.stream_table import StreamTable
from nanocore.client.tokenizer import Tokenizer
from nanocore.engine_core.io.session import output_frames
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.codec import (
    client_decoder,
    encode,
    engine_decoder,
    pack_int32,
    unpack_output,
)
from nanocore.protocol.messages import Accepted, Output, Submit

NUM_PROMPT_TOKENS: Final = 128
VOCAB_SIZE: Final = 151_936
"""Ids of prompts in `submit_us`: up to that of the largest vocabularies."""

_NUM_STEPS, _NUM_WARM_STEPS = 128, 8
_REPEAT_NS: Final = 40_000_000
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 10.0


def client_us_per_token(
    num_streams: int,
    repeats: int,
    stop: str | None = None,
    tokenizer_folder: Path | None = None,
) -> list[float]:
    """The client's cost of a token: one OUTPUT for all streams, then every stream is read."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder or demo_folder())
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    params = SamplingParams(stop=stop)
    figures = []
    for _ in range(repeats):
        table = StreamTable()
        streams = [
            RequestStream(
                f"r{i}", None, _circle(text_ids, 7 * i, NUM_PROMPT_TOKENS), params, tokenizer,
                leave=_no_leaving,
            )
            for i in range(num_streams)
        ]  # fmt: skip
        for handle, stream in enumerate(streams):
            table.add(stream)
            table.accept(Accepted(request_id=stream.request_id, handle=handle, seed=0))
        steps = [
            encode(
                Output(
                    handles=pack_int32(range(num_streams)),
                    tokens=pack_int32(
                        text_ids[(7 * i + NUM_PROMPT_TOKENS + step) % len(text_ids)]
                        for i in range(num_streams)
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
    gc.collect()
    gc.freeze()
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
    gc.unfreeze()
    assert output is not None
    assert len(output.outputs[0].token_ids) == len(steps)
    assert len(output.outputs[0].text) > 1
    return spent_ns


def outputs_us(num_requests: int, repeats: int) -> list[float]:
    """A step's output of one token per request: encode, decode, unpack."""
    return per_call_us(outputs_both_ways(num_requests), repeats)


def outputs_both_ways(num_requests: int) -> Callable[[], Any]:
    """A call that encodes, decodes and unpacks a step's output of one token per request."""
    numbers = np.arange(num_requests)
    tokens = TokenColumns(numbers.astype(np.uint32), numbers.astype(np.int32))
    decode = client_decoder().decode

    def both_ways() -> Any:
        message = decode(output_frames(tokens, []))
        assert isinstance(message, Output)
        return unpack_output(message)

    return both_ways


def submit_us(num_tokens: int, repeats: int) -> list[float]:
    """A request's way over the wire: token ids to column, encode, decode."""
    drawn = random.Random(4)
    token_ids = [drawn.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True)
    sampling = params.for_engine()
    decode = engine_decoder().decode

    def both_ways() -> None:
        column = pack_int32(token_ids)
        submit = Submit(request_id="0" * 32, prompt_token_ids=column, sampling=sampling)
        decode(encode(submit))

    return per_call_us(both_ways, repeats)


def both_processes(
    num_streams: int, num_output_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """All streams at once through a client here and an engine without a model in a process.

    client_cpu_us_per_token, core_cpu_us_per_token: CPU time of each process, all threads, requests
    and prompts included. wall_us_per_token: of both. tokens_per_chunk: tokens that a reader found
    at once; the engine does not wait for the client.
    """
    with no_model_engine() as (endpoint, pid):
        return asyncio.run(_both(endpoint, pid, num_streams, num_output_tokens, repeats))


async def _both(
    endpoint: str, pid: int, num_streams: int, num_output_tokens: int, repeats: int
) -> dict[str, list[float]]:
    drawn = random.Random(7)
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    core_clock = _process_clock(pid)
    figures: dict[str, list[float]] = {
        "client_cpu_us_per_token": [],
        "core_cpu_us_per_token": [],
        "wall_us_per_token": [],
        "tokens_per_chunk": [],
    }
    async with AsyncEngineClient.connect(endpoint) as client:
        vocab_size = client.model_card.vocab_size

        async def read(prompt: list[int]) -> int:
            outputs = client.generate(prompt, params)
            num_tokens = [output.metrics.num_output_tokens async for output in outputs]
            assert num_tokens[-1] == num_output_tokens
            return len(num_tokens)

        for repeat in range(-1, repeats):  # the first one warms up
            prompts = [
                [drawn.randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
                for _ in range(num_streams)
            ]
            before = time.process_time(), time.clock_gettime(core_clock), time.perf_counter()
            await client.pause()  # all streams start together, however fast the engine is
            reading = asyncio.gather(*map(read, prompts))
            await asyncio.sleep(0)
            await client.resume()
            num_chunks = await reading
            after = time.process_time(), time.clock_gettime(core_clock), time.perf_counter()
            if repeat >= 0:
                num_tokens = num_streams * num_output_tokens
                spent = [(b - a) * 1e6 / num_tokens for a, b in zip(before, after, strict=True)]
                values = [*spent, num_tokens / sum(num_chunks)]
                for name, value in zip(figures, values, strict=True):
                    figures[name].append(value)
    return figures


@contextmanager
def no_model_engine() -> Iterator[tuple[str, int]]:
    """An engine without a model: its endpoint and process id. It ends with us, however we end."""
    directory = Path(tempfile.mkdtemp(prefix="nanocore-"))
    endpoint = f"ipc://{directory / 'engine.sock'}"
    link, engine_end = socket.socketpair()
    process = subprocess.Popen(
        [
            sys.executable, str(Path(__file__).with_name("no_model_engine.py")),
            "--parent-fd", str(engine_end.fileno()), "--listen", endpoint,
            "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192",
        ],
        pass_fds=[engine_end.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    engine_end.close()
    try:
        link.settimeout(_START_TIMEOUT_S)
        if not link.recv(65536):
            raise RuntimeError(f"the engine died at start with exit code {process.wait()}")
        yield endpoint, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        link.close()
        shutil.rmtree(directory, ignore_errors=True)


def _process_clock(pid: int) -> int:
    """The clock of another process's CPU time, in nanoseconds; /proc counts in ticks of 10 ms."""
    return (~pid << 3) | 2  # Linux: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)


def per_call_us(call: Callable[[], Any], repeats: int) -> list[float]:
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


def _circle(token_ids: list[int], start: int, num_tokens: int) -> list[int]:
    """Tokens of a text that is read in a circle."""
    return [token_ids[(start + i) % len(token_ids)] for i in range(num_tokens)]


def _no_leaving(stream: RequestStream) -> None:
    raise AssertionError(f"{stream.request_id} was left")


def main() -> None:
    """Print the median and the range of every figure."""
    parser = argparse.ArgumentParser(description="CPU time of wire and client")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokenizer", type=Path, help="folder (the demo model's)")
    arguments = parser.parse_args()
    repeats, folder = arguments.repeats, arguments.tokenizer

    def show(name: str, figures: list[float]) -> None:
        low, high = min(figures), max(figures)
        print(f"{name:52}{statistics.median(figures):9.2f}  ({low:.2f} to {high:.2f})")

    print("microseconds of CPU time, median (range)")
    for stop in (None, "</never-said>"):
        name = f"client, per token, 256 streams, stop={stop}"
        show(name, client_us_per_token(256, repeats, stop, folder))
    for num_requests in (256, 1024):
        show(f"outputs of {num_requests} requests", outputs_us(num_requests, repeats))
    for num_tokens in (128, 2048, 32_768):
        show(f"request of {num_tokens} tokens", submit_us(num_tokens, repeats))
    for name, figures in both_processes(256, 128, repeats).items():
        show(f"both processes, {name}", figures)


if __name__ == "__main__":
    main()
