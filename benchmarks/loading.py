"""How long it takes to load a checkpoint of 1.2 GB, and how much memory beside the parameters.

    nice -n -15 python benchmarks/loading.py [--rounds 5]

Writes a checkpoint with the shapes of Qwen3-0.6B and random bfloat16 values to a temporary folder,
in one file and in four. Each measurement is a process of its own, cases take turns, and the page
cache is warm. Beside each load stands a plain read of the same files into one buffer, in the same
process. The kernel gives memory out when it is first touched, which can cost more than reading:
`first_touch_s` is that of as many new bytes, and `load_again_s` a load into memory that has been
touched. Writes benchmarks/results/loading.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from machine import describe_run, nice_sessions, spread, write_report
from models import SHAPES
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanocore.worker.loading.checkpoint import INDEX_FILE
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.weights import Index, Part, Slot, Slots

RESULTS: Final = Path(__file__).parent / "results" / "loading.json"
SHAPE: Final = SHAPES["qwen3-0.6b"]
NUM_SHARDS: Final = 4
BUFFER_BYTES: Final = 16 * 2**20
CASES: Final = {
    "whole": "one file, all of it, bfloat16",
    "shards": "four files, all of it, bfloat16",
    "tp2": "one file, rank 0 of 2, bfloat16",
    "float32": "one file, all of it, into float32 parameters",
    "get_tensor": "one file, all of it, by safetensors' get_tensor and copy_ (for comparison)",
    "dummy": "no file: --load-format dummy, bfloat16",
}


def make_checkpoints(folder: Path) -> None:
    """Write `one/` and `four/`: the same tensors in one file and in four with an index."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randint(-(2**14), 2**14, shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, shape in SHAPE.tensor_shapes()
    }
    for name in ("one", "four"):
        (folder / name).mkdir()
    save_file(tensors, folder / "one" / "model.safetensors")
    weight_map: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        file = f"model-{shard + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        names = list(tensors)[shard::NUM_SHARDS]
        save_file({name: tensors[name] for name in names}, folder / "four" / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "four" / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def make_slots(dtype: torch.dtype, tp_size: int) -> Slots:
    """What rank 0 keeps, in new memory that nothing has touched."""
    slots: Slots = {}
    for name, shape in SHAPE.tensor_shapes():
        index: Index = ()
        if tp_size > 1 and len(shape) == 2:
            is_row_parallel = "o_proj" in name or "down_proj" in name
            columns = shape[1] // tp_size if is_row_parallel else shape[1]
            rows = shape[0] if is_row_parallel else shape[0] // tp_size
            index = (slice(0, rows), slice(0, columns))
        size = torch.empty(shape, device="meta")[index].shape
        slots[name] = Slot(shape, [Part(torch.empty(size, dtype=dtype), index)])
    return slots


def measure(case: str, folder: Path) -> dict[str, float]:
    """One process: a plain read, a load into new memory, one into the same, a first touch."""
    files = sorted((folder / ("four" if case == "shards" else "one")).glob("*.safetensors"))
    slots = make_slots(
        torch.float32 if case == "float32" else torch.bfloat16, 2 if case == "tp2" else 1
    )
    load: Callable[[], object]
    if case == "dummy":
        load = lambda: fill_dummy_weights(slots)  # noqa: E731
    elif case == "get_tensor":
        load = lambda: _copy_by_get_tensor(files[0], slots)  # noqa: E731
    else:
        load = lambda: load_weights(files[0].parent, slots, str)  # noqa: E731
    _plain_read(files)  # warms the page cache
    plain_s = _timed(lambda: _plain_read(files))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes = _status_bytes("VmRSS")
    load_s = _timed(load)
    extra_bytes = _status_bytes("VmHWM") - before_bytes
    again_s = _timed(load)
    parameter_bytes = sum(part.target.nbytes for slot in slots.values() for part in slot.parts)
    new = torch.empty(parameter_bytes, dtype=torch.uint8)
    touch_s = _timed(new.zero_)
    return {
        "plain_read_s": plain_s,
        "load_s": load_s,
        "load_by_plain_read": load_s / plain_s,
        "first_touch_s": touch_s,
        "load_by_plain_read_and_touch": load_s / (plain_s + touch_s),
        "load_again_s": again_s,
        "load_again_by_plain_read": again_s / plain_s,
        "parameter_mb": parameter_bytes / 1e6,
        "peak_extra_mb": extra_bytes / 1e6,
        "peak_extra_by_parameters": extra_bytes / parameter_bytes,
    }


def _plain_read(files: list[Path]) -> None:
    buffer = bytearray(BUFFER_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _copy_by_get_tensor(path: Path, slots: Slots) -> None:
    with safe_open(path, framework="pt") as file:
        for name, slot in slots.items():
            target: Tensor = slot.parts[0].target
            target.copy_(file.get_tensor(name))


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _status_bytes(key: str) -> int:
    """VmRSS or its peak VmHWM: anonymous, shared and mapped pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _measure_apart(case: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", case, "--folder", str(folder)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.folder)))
        return
    rounds: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="nanocore-loading-") as name, nice_sessions():
        folder = Path(name)
        make_checkpoints(folder)
        for _ in range(arguments.rounds):
            for case in CASES:
                rounds[case].append(_measure_apart(case, folder))
    summary: dict[str, Any] = {}
    for case, what in CASES.items():
        figures = {key: spread([r[key] for r in rounds[case]]) for key in rounds[case][0]}
        summary[case] = {"what": what, **figures}
        print(f"{case}: {what}")
        for key, row in figures.items():
            print(f"  {key:28} {row['median']:9.3f} ({row['min']:.3f}-{row['max']:.3f})")
    write_report(arguments.out, {**describe_run(), "cases": summary})


if __name__ == "__main__":
    main()
