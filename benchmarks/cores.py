"""How speed grows with cores: W1, W2 and W5 on 1, 2, 4, 8 and 16 of them, beside a model of it.

    nice -n -15 python benchmarks/cores.py [--model small] [--counts 1 2 4 8 16]

Each count is an engine of its own, whose affinity mask has so many cores: NUMA node by node, and
hyperthreads of a core side by side. Beside it stand rates on the same cores: reading
weights for one row, products of 512 rows, and what a loop costs the thread pool that has next to
nothing to do. `expected` is made of these and of the model's size (see `Rates`). Weights are
random. Writes results/cores.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from models import SHAPES, ModelShape, write_config
from peer_process import PeerCommand, PeerError, PeerProcess
from report import describe_run, positive, spread, table, with_range, write_report
from workloads import WORKLOAD_NAMES, Workload, make_workload

from nanocore.system.cpu_cores import read_cores

RESULTS: Final = Path(__file__).parent / "results" / "cores.json"
_ROOT: Final = Path(__file__).resolve().parent.parent
_DRIVER: Final = Path(__file__).parent / "peers" / "nanocore_driver.py"
_LOOPS_PER_LAYER: Final = 5
"""Kernels of a layer whose work threads share when a step has one row: 4 products, attention."""
_READ_MIB: Final = 512
_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class Rates:
    """What some cores give. bytes_per_s: of weights, with one row. flops_per_s: of many rows.
    loop_s: a loop of the pool beyond its work.
    """

    bytes_per_s: float
    flops_per_s: float
    loop_s: float

    def decode_s(self, shape: ModelShape, num_rows: int, context: int) -> float:
        """Expected seconds of a step of decodes: reading or multiplying, and the pool's loops."""
        kv_bytes = 4 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
        num_bytes = 2 * num_weights(shape) + num_rows * context * kv_bytes
        work_s = max(num_bytes / self.bytes_per_s, self._products_s(shape, num_rows))
        return work_s + (_LOOPS_PER_LAYER * shape.num_hidden_layers + 1) * self.loop_s

    def prefill_s(self, shape: ModelShape, num_tokens: int) -> float:
        """Expected seconds of prompts: their products alone, without attention."""
        return self._products_s(shape, num_tokens)

    def _products_s(self, shape: ModelShape, num_rows: int) -> float:
        return 2 * num_weights(shape) * num_rows / self.flops_per_s


def num_weights(shape: ModelShape) -> int:
    """Weights of the layers and the head."""
    heads = shape.num_attention_heads, shape.num_key_value_heads
    of_attention = 2 * sum(heads) * shape.head_dim * shape.hidden_size
    of_mlp = 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size
    return shape.num_hidden_layers * (of_attention + of_mlp) + head


def expected(rates: Rates, shape: ModelShape, workload: Workload) -> dict[str, float]:
    """What the model says of a workload whose requests are alike: seconds, and figures of it."""
    num_rows, first = len(workload.requests), workload.requests[0]
    num_steps = first.num_output_tokens - 1
    context = len(first.prompt_token_ids) + num_steps // 2
    step_s = rates.decode_s(shape, num_rows, context)
    wall_s = rates.prefill_s(shape, workload.num_prompt_tokens) + num_steps * step_s
    return {"wall_s": wall_s, "step_s": step_s}


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--counts", nargs="+", type=positive, help="numbers of cores")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOAD_NAMES, default=["W1", "W2", "W5"]
    )
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin no count after that")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rates", action="store_true", help="measure rates on this mask's cores")
    arguments = parser.parse_args()
    if arguments.rates:
        print(json.dumps(asdict(measure_rates())))
        return
    found, start_s = read_cores(), time.monotonic()
    report: dict[str, Any] = {**describe_run(), "model": arguments.model, "counts": {}}
    report["cores"] = {"nodes": found.nodes, "quota": found.quota}
    cores = [core for node in found.nodes for core in node]
    for count in arguments.counts or default_counts(len(cores)):
        if time.monotonic() - start_s > arguments.limit_s:
            break
        if not 0 < count <= len(cores):
            print(f"{count}: there are {len(cores)} cores", file=sys.stderr)
            continue
        report["counts"][str(count)] = _measure(arguments, set(cores[:count]))
        print(f"{count}: {report['counts'][str(count)]}", file=sys.stderr, flush=True)
        write_report(arguments.out, report)
    if not report["counts"]:
        sys.exit(f"cores.py: no count was measured: it may be 1 to {len(cores)}; see --limit-s")
    print(markdown(report))


def default_counts(num_cores: int) -> list[int]:
    """Powers of two, and all cores."""
    return [*(2**i for i in range(10) if 2**i < num_cores), num_cores]


def _measure(arguments: argparse.Namespace, cores: set[int]) -> dict[str, Any]:
    rates = Rates(**json.loads(_within(cores, [str(Path(__file__)), "--rates"])))
    shape = SHAPES[arguments.model]
    figures: dict[str, Any] = {"cores": sorted(cores), "rates": asdict(rates), "workloads": {}}
    with tempfile.TemporaryDirectory(prefix="nanocore-cores-") as name:
        write_config(shape, Path(name, "model"))
        flags = [
            "--device",
            "cpu",
            "--load-format",
            "dummy",
            "--kv-cache-memory-bytes",
            f"{2 << 30}",
        ]
        command = [str(_DRIVER), "--model", f"{name}/model", "--max-model-len", "2048", *flags]
        peer = PeerCommand("nanocore", _pinned(cores, command), _environment())
        with PeerProcess(peer, Path(name, "log")) as engine:
            try:
                engine.wait_ready()
                for workload in arguments.workloads:
                    figures["workloads"][workload] = _run(engine, workload, arguments, rates)
            except PeerError as error:
                sys.exit(f"cores.py: {error}")
    return figures


def _run(
    engine: PeerProcess, name: str, arguments: argparse.Namespace, rates: Rates
) -> dict[str, Any]:
    shape, walls_s, steps_s = SHAPES[arguments.model], [], []
    for repetition in range(arguments.reps + 1):  # the first warms up
        workload = make_workload(name, shape.vocab_size, repetition)
        with engine.turn():
            run = engine.run(workload.requests)
        if repetition:
            walls_s.append(run.wall_s)
            steps_s.append(median(run.tpot_s))
    tokens = workload.num_output_tokens + (workload.num_prompt_tokens if name == "W2" else 0)
    return {
        "tokens_per_s": spread([tokens / wall_s for wall_s in walls_s], 1),
        "step_s": spread(steps_s, 5),
        "expected": expected(rates, shape, workload),
        "expected_tokens_per_s": round(tokens / expected(rates, shape, workload)["wall_s"], 1),
    }


def _environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), str(_ROOT), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _pinned(cores: set[int], command: list[str]) -> list[str]:
    """Run a Python program within an affinity mask."""
    set_mask = (
        "import os, sys; os.sched_setaffinity(0, {cores}); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", set_mask.format(cores=sorted(cores)), *command]


def _within(cores: set[int], command: list[str]) -> str:
    environment = os.environ | _environment()
    return subprocess.check_output(_pinned(cores, command), env=environment, text=True)


def measure_rates() -> Rates:
    """Rates of native kernels on all cores of the affinity mask."""
    import torch

    from nanocore.kernels.cpu.cpu_backend import CpuKernels
    from nanocore.kernels.cpu.library import find_library

    library = find_library()
    if library is None:
        sys.exit("cores.py: no compiled kernels run on this machine")
    kernels = CpuKernels(library)
    num_threads = len(os.sched_getaffinity(0))

    def weight(outputs: int, inputs: int) -> Any:
        return kernels.pack_linear(torch.randn(outputs, inputs).bfloat16())

    one_row, rows = torch.randn(1, 4096).bfloat16(), torch.randn(_ROWS, 2048).bfloat16()
    weights = [weight(4096, 4096) for _ in range(_READ_MIB // 32)]
    square, tiny, none = weight(2048, 2048), weight(32 * 4 * num_threads, 32), weight(32, 32)
    short = torch.randn(1, 32).bfloat16()

    def read() -> None:
        for one in weights:
            kernels.linear(one_row, one)

    def loops(of: Any) -> Callable[[], object]:
        return lambda: [kernels.linear(short, of) for _ in range(500)]

    read_s = _seconds(read)
    loop_s = (_seconds(loops(tiny)) - _seconds(loops(none))) / 500
    product_s = _seconds(lambda: [kernels.linear(rows, square) for _ in range(5)]) / 5
    return Rates(_READ_MIB * 2**20 / read_s, 2 * _ROWS * 2048**2 / product_s, max(0.0, loop_s))


def _seconds(run: Callable[[], object], rounds: int = 7) -> float:
    """The median, after one round to warm up."""
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return median(times[1:])


def markdown(report: dict[str, Any]) -> str:
    """A row for each count of cores."""
    names = next(iter(report["counts"].values()))["workloads"]
    rows = [["cores", "reading", "products", "a loop", *(f"{name} (expected)" for name in names)]]
    for count, figures in report["counts"].items():
        rates = Rates(**figures["rates"])
        row = [
            count,
            f"{rates.bytes_per_s / 1e9:.1f} GB/s",
            f"{rates.flops_per_s / 1e12:.2f} TFLOP/s",
            f"{rates.loop_s * 1e6:.1f} us",
        ]
        for name in names:
            of_name = figures["workloads"][name]
            shown = with_range(of_name["tokens_per_s"], 0)
            row.append(f"{shown} tok/s ({of_name['expected_tokens_per_s']:,.0f})")
        rows.append(row)
    return table(rows)


if __name__ == "__main__":
    main()
