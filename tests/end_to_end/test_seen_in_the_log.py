"""What an engine says of memory, machine and steps, from its start to its end."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from tests.end_to_end import forked
from tests.end_to_end.engine_process import EXIT_TIMEOUT_S

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
MEASURED = "machine_bytes_per_second"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_tells_what_it_could_do_and_what_it_did(
    tp_size: int, tiny_model: Path, short_path: Path
) -> None:
    log, endpoint = short_path / "log", f"ipc://{short_path}/e/engine.sock"
    flags = ("--model", str(tiny_model), "--device", "cpu", "--listen", endpoint)

    async def complete() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.complete(list(range(5, 25)), PARAMS)
            while not any(one.name == MEASURED for one in await client.metrics()):
                await asyncio.sleep(0.05)  # when it has had nothing to do a while

    process = forked.start(log, (*flags, "--tp", str(tp_size)))
    try:
        asyncio.run(asyncio.wait_for(complete(), 60))
    finally:
        process.terminate()
        process.join(EXIT_TIMEOUT_S)
    text = log.read_text()
    assert re.search(r"\) memory .*weights [\d.,]+ MB.* bytes of KV a token\n", text)
    assert re.search(r"\) prefill: 1 step, 20 tokens, [\d.]+ s; [\d.]+% of .*\(MFU\)\n", text)
    assert re.search(r"\) decode: 8 steps, 8 tokens, [\d.]+ s; [\d.]+% of .*\(MFU\)\n", text)
