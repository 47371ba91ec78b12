"""What the wire costs: encoding and decoding beside vLLM's layout, round trips beside an echo.

    nice -n -15 python benchmarks/wire.py [--repeats 15] [--quick]

Everything is measured in one run, alternately, and written to benchmarks/results/wire.json:

outputs_256          a step's OUTPUT for 256 requests, CPU microseconds: encode, decode, unpack to
                     the columns that the SDK reads
submit_32768_array   a request of 32,768 tokens, from an array("i") of ids to a numpy array in the
                     engine, CPU microseconds: pack, encode, decode, view
submit_32768_list    the same from a Python list of ids
pack_32768_list      of that, the packing of the list into a column
*_vllm_layout        encode and decode of the corresponding messages of vLLM 0.32, REPRODUCED with
                     msgspec by `vllm_layout.py`: not vLLM itself (overhead.py measures that)
echo, ping, health   round trips over ipc, microseconds on the wall; see `round_trips.py`
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from machine import describe_run, nice_sessions, spread, write_report
from overhead_client import VOCAB_SIZE, outputs_both_ways, per_call_us
from round_trips import round_trips_us
from vllm_layout import outputs_both_ways as vllm_outputs_both_ways
from vllm_layout import submit_both_ways as vllm_submit_both_ways

from nanocore.client import SamplingParams
from nanocore.protocol.codec import encode, engine_decoder, pack_int32
from nanocore.protocol.messages import Submit

RESULTS: Final = Path(__file__).parent / "results" / "wire.json"
NOTE: Final = "*_vllm_layout: vLLM 0.32's message layout reproduced with msgspec, not vLLM itself"
Figures = dict[str, list[float]]
GOALS: Final = [
    ("outputs_256", "outputs_256_vllm_layout", "at least 6x cheaper", 1 / 6),
    ("submit_32768_array", "submit_32768_vllm_layout", "at least 10x cheaper", 1 / 10),
    ("submit_32768_list", "submit_32768_vllm_layout", "at least 10x cheaper", 1 / 10),
    ("ping", "echo", "at most 1.5x", 1.5),
    ("health", "echo", "no goal", None),
]


def submit_both_ways(token_ids: list[int] | array[int]) -> Callable[[], Any]:
    """A call that takes a prompt from the caller's list or array to the engine's."""
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
    return both_ways


def measure(repeats: int, num_trips: int) -> Figures:
    """Every figure, once per repeat."""
    drawn = random.Random(4)
    token_ids = [drawn.randrange(VOCAB_SIZE) for _ in range(32_768)]
    calls: dict[str, Callable[[], Any]] = {
        "outputs_256": outputs_both_ways(256),
        "outputs_256_vllm_layout": vllm_outputs_both_ways(256),
        "submit_32768_array": submit_both_ways(array("i", token_ids)),
        "submit_32768_list": submit_both_ways(token_ids),
        "submit_32768_vllm_layout": vllm_submit_both_ways(token_ids),
        "pack_32768_list": lambda: pack_int32(token_ids),
    }
    gc.collect()
    gc.freeze()
    figures: Figures = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            figures[key] += per_call_us(call, 1)
    gc.unfreeze()
    return {**figures, **round_trips_us(num_trips, repeats)}


def print_table(figures: Figures) -> None:
    """Medians with their ranges, and the goals."""
    print(NOTE)
    print(f"{'median us (range)':28}")
    for key, values in figures.items():
        median = statistics.median(values)
        print(f"{key:28}{median:10.2f}  ({min(values):.2f} to {max(values):.2f})")
    for key, base, goal, limit in GOALS:
        ratio = statistics.median(figures[key]) / statistics.median(figures[base])
        verdict = "" if limit is None else "  met" if ratio <= limit else "  MISSED"
        shown = f"{ratio:.2f}" if ratio > 1 else f"{1 / ratio:.1f}x cheaper"
        print(f"{key} / {base}: {shown}; goal: {goal}{verdict}")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="cost of the wire")
    parser.add_argument("--repeats", type=int, default=15, help="of each figure")
    parser.add_argument("--quick", action="store_true", help="two short repeats: to see it run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    repeats, num_trips = (2, 250) if arguments.quick else (arguments.repeats, 2_000)
    with nice_sessions():
        figures = measure(repeats, num_trips)
    print_table(figures)
    record = {
        **describe_run(),
        "unit": "microseconds; CPU time, but echo, ping and health on the wall",
        "note": NOTE,
        "figures": {
            key: spread([round(value, 3) for value in values]) for key, values in figures.items()
        },
    }
    write_report(arguments.out, record)


if __name__ == "__main__":
    main()
