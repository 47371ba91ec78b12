"""How fast products and attention of prompts are: GFLOP/s, next to torch (oneDNN) on equal sizes.

    nice -n -15 python benchmarks/prompt_rates.py [--rounds 7] [--rows 64 256 1024 2048]

For each family's linear layers, all sides run in turns, on the same inputs: ours in bf16, int8 and
int4, and torch's in bf16 and float32. `beside` is the faster of torch's two through ours in bf16,
within a round. Attention is of one prompt in bf16, causal; torch's is scaled_dot_product_attention;
its share is of what our bf16 products reach at as many rows. Writes results/prompt-rates.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attention_step import make_metadata
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library

RESULTS: Final = Path(__file__).parent / "results" / "prompt-rates.json"
LAYERS: Final = {
    "small gate and up": (512, 3072),
    "SmolLM2 135M down": (1536, 576),
    "Gemma 3 270M gate and up": (640, 4096),
    "Qwen3 0.6B QKV": (1024, 4096),
    "Qwen3 0.6B gate and up": (1024, 6144),
    "Qwen3 0.6B down": (3072, 1024),
    "Llama 3.2 1B gate and up": (2048, 16384),
    "Qwen3 4B down": (9728, 2560),
}
"""(inputs, outputs) of linear layers of served families."""
HEADS: Final = {"small": (8, 4, 64), "Qwen3 0.6B": (16, 8, 128), "Gemma 3 270M": (4, 1, 256)}
"""(query heads, KV heads, size of a head)"""
_BLOCK_SIZE: Final = 16
_MIN_S: Final = 0.02


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--rows", type=positive, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    library = find_library()
    if library is None:
        sys.exit("prompt_rates.py: no compiled kernels run on this machine")
    report: dict[str, Any] = {**describe_run(), "instruction_set": library.instruction_set}
    report |= {"threads": torch.get_num_threads(), "products": {}, "attention": {}}
    kernels = CpuKernels(library)
    with torch.inference_mode():
        for name in arguments.layers:
            for rows in arguments.rows:
                figures = measure_products(kernels, *LAYERS[name], rows, arguments.rounds)
                report["products"][f"{name}, {rows} rows"] = figures
        for name, sizes in HEADS.items():
            figures = measure_attention(kernels, *sizes, arguments.rows[-1], arguments.rounds)
            report["attention"][f"{name}, {arguments.rows[-1]} tokens"] = figures
    print(markdown(report))
    write_report(arguments.out, report)


def measure_products(
    kernels: CpuKernels, inputs: int, outputs: int, rows: int, rounds: int
) -> dict[str, Any]:
    """GFLOP/s by side, and `beside`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16()
    packed = {name: kernels.pack_linear(weight, name) for name in (None, "int8", "int4")}
    wide_x, wide_weight = x.float(), weight.float()
    sides: dict[str, Callable[[], object]] = {
        "bf16": lambda: kernels.linear(x, packed[None]),
        "int8": lambda: kernels.linear(x, packed["int8"]),
        "int4": lambda: kernels.linear(x, packed["int4"]),
        "torch bf16": lambda: torch.nn.functional.linear(x, weight),
        "torch float32": lambda: torch.nn.functional.linear(wide_x, wide_weight),
    }
    seconds = _in_turns(sides, rounds)
    best = map(min, seconds["torch bf16"], seconds["torch float32"])
    beside = [theirs / ours for theirs, ours in zip(best, seconds["bf16"], strict=True)]
    return _rates(seconds, 2 * rows * inputs * outputs) | {"beside": spread(beside)}


def measure_attention(
    kernels: CpuKernels, num_heads: int, num_kv: int, size: int, length: int, rounds: int
) -> dict[str, Any]:
    """GFLOP/s by side, and the share of our products of as many rows."""
    generator = torch.Generator().manual_seed(0)
    spec, metadata = AttentionSpec(size**-0.5), _one_prompt(length)
    cache_shape = (2, metadata.block_table.shape[1], _BLOCK_SIZE, num_kv, size)
    cache = KVCache(*torch.randn(cache_shape, generator=generator).bfloat16())
    q_THD = torch.randn(length, num_heads, size, generator=generator).bfloat16()
    q, k, v = (
        torch.randn(1, heads, length, size, generator=generator).bfloat16()
        for heads in (num_heads, num_kv, num_kv)
    )
    inputs, outputs = num_heads * size, 4 * num_heads * size
    x, weight = torch.randn(length, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    packed = kernels.pack_linear(weight, None)
    sides: dict[str, Callable[[], object]] = {
        "attention": lambda: kernels.paged_attention(q_THD, cache, metadata, spec),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        "products": lambda: kernels.linear(x, packed),
    }
    seconds = _in_turns(sides, rounds)
    products_s = seconds.pop("products")
    work, product_work = 2 * num_heads * size * length * length, 2 * length * inputs * outputs
    factor = work / product_work
    pairs = zip(products_s, seconds["attention"], strict=True)
    return {
        **_rates(seconds, work),
        **_rates({"products": products_s}, product_work),
        "share": spread([product_s * factor / own_s for product_s, own_s in pairs]),
    }


def _one_prompt(length: int) -> AttentionMetadata:
    table_BM = torch.arange(-(-length // _BLOCK_SIZE), dtype=torch.int32)[None]
    return make_metadata([(length, length)], table_BM, _BLOCK_SIZE)


def _in_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a run by side, one for each round."""
    counts, seconds = {}, {name: list[float]() for name in sides}
    for name, run in sides.items():
        run()
        counts[name] = max(1, int(_MIN_S / _time(run, 1)))
    for _ in range(rounds):
        for name, run in sides.items():
            run()  # the other side's threads no longer spin, and caches are its own
            seconds[name].append(_time(run, counts[name]))
    return seconds


def _time(run: Callable[[], object], count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start_s) / count


def _rates(seconds: Mapping[str, list[float]], work: int) -> dict[str, Any]:
    return {name: spread([work / one_s / 1e9 for one_s in values])
            for name, values in seconds.items()}  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """A table of products, and one of attention."""
    tables = []
    for kind in ("products", "attention"):
        found = report[kind]
        names = list(next(iter(found.values())))
        digits = [2 if name in ("beside", "share") else 0 for name in names]
        rows = [[place, *map(with_range, one.values(), digits)] for place, one in found.items()]
        tables.append(table([[f"{kind}, GFLOP/s", *names], *rows]))
    return "\n".join(tables)


if __name__ == "__main__":
    main()
