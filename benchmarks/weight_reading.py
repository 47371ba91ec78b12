"""How close linear layers come to the speed of memory when a step has a single token.

    nice -n -15 python benchmarks/weight_reading.py [--rounds 15]

One row is multiplied with weights that are together larger than any cache, next to plain reading of
as many bytes (torch's sum, all threads), alternately. `share` is reading's time through the
kernel's, within a round; 1.0 is a kernel that costs what reading its weights does. `int8` and
`int4` quantize activations to eight bits; `… activations kept` are those of
--activation-quantization none. Writes results/weight-reading.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.cpu.linear import huge_pages
from nanocore.kernels.linear_weight import LinearWeight

RESULTS: Final = Path(__file__).parent / "results" / "weight-reading.json"
_PAUSE_S: Final = 0.02
KINDS: Final = {
    "bf16": (None, False),
    "int8": ("int8", False),
    "int4": ("int4", False),
    "int8, activations kept": ("int8", True),
    "int4, activations kept": ("int4", True),
}
"""By name: the quantization, and whether activations stay as they are."""


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--outputs", type=positive, default=16384, help="of a weight")
    parser.add_argument("--inputs", type=positive, default=4096, help="of a weight")
    parser.add_argument(
        "--mib", type=positive, default=1024, help="the least, of all weights of a kind"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    library = find_library()
    if library is None:
        sys.exit("weight_reading.py: no compiled kernels run on this machine")
    size = (arguments.outputs, arguments.inputs)
    report: dict[str, Any] = {**describe_run(), "instruction_set": library.instruction_set}
    report |= {"weight": size, "kinds": {}}
    for name, (quantization, keeps_activations) in KINDS.items():
        kernels = CpuKernels(library, keeps_activations=keeps_activations)
        weights = _weights(kernels, size, arguments.mib << 20, quantization)
        report["kinds"][name] = measure(kernels, weights, arguments.rounds)
    print(markdown(report))
    write_report(arguments.out, report)


def _weights(
    kernels: CpuKernels, size: tuple[int, int], num_bytes: int, quantization: str | None
) -> list[LinearWeight]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator).to(torch.bfloat16)
    first = kernels.pack_linear(weight, quantization)
    others = range(-(-num_bytes // first.num_bytes) - 1)
    return [first, *(kernels.pack_linear(weight, quantization) for _ in others)]


def measure(kernels: CpuKernels, weights: list[LinearWeight], num_rounds: int) -> dict[str, Any]:
    """Both sides in turns; figures of each, and the share."""
    num_bytes = sum(weight.num_bytes for weight in weights)
    row = torch.randn(1, weights[0].in_features, dtype=torch.bfloat16)
    plain = huge_pages(num_bytes // 4 * 4).view(torch.float32).fill_(1.0)

    def multiply() -> None:
        for weight in weights:
            kernels.linear(row, weight)

    multiply()
    reading_s, kernel_s = [], []
    for _ in range(num_rounds):
        reading_s.append(_time(plain.sum))
        kernel_s.append(_time(multiply))
    pairs = zip(reading_s, kernel_s, strict=True)
    return {
        "bytes": num_bytes,
        "reading_gb_per_s": spread([num_bytes / time_s / 1e9 for time_s in reading_s]),
        "kernel_gb_per_s": spread([num_bytes / time_s / 1e9 for time_s in kernel_s]),
        "share": spread([read_s / time_s for read_s, time_s in pairs]),
        "share_of_best": round(min(reading_s) / min(kernel_s), 4),
    }


def _time(run: Callable[[], object]) -> float:
    """The second of two runs, once the other side's threads no longer spin."""
    time.sleep(_PAUSE_S)
    run()
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def markdown(report: dict[str, Any]) -> str:
    """A row for each kind of weight."""
    rows = [["weights", "MiB", "reading, GB/s", "kernel, GB/s", "share", "share of the best"]]
    for name, kind in report["kinds"].items():
        figures = (kind["reading_gb_per_s"], kind["kernel_gb_per_s"])
        cells = [with_range(figure, 1) for figure in figures]
        share = with_range(kind["share"], 2)
        rows.append([name, f"{kind['bytes'] / 2**20:,.0f}", *cells, share,
                     f"{kind['share_of_best']:.2f}"])  # fmt: skip
    return table(rows)


if __name__ == "__main__":
    main()
