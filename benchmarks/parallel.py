"""What tensor and pipeline parallelism gain or cost on a CPU, in output tokens per second.

    nice -n -15 python benchmarks/parallel.py [--model small] [--engines tp1,tp2,pp2] [--rounds 5]

16 requests of 128 tokens each decode 128 tokens (workload W1 of `workloads.py`). Engines run one at
a time, in turn, each started anew and warmed up by one repetition that does not count. One rank
has all cores for its threads; two ranks have half of them each.
Writes benchmarks/results/parallel.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from machine import CpuTimes, describe_run, nice_sessions, spread, write_report
from models import SHAPES, model_folder
from offline import submit
from workloads import make_workload

from nanocore.client import LLM
from nanocore.client.engine_flags import EngineArgument

RESULTS: Final = Path(__file__).parent / "results" / "parallel.json"
ENGINES: Final[dict[str, dict[str, EngineArgument]]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def measure(model: Path, engine: str, round_number: int, name: str) -> dict[str, float]:
    """One engine, from start to end."""
    engine_args = ENGINES[engine]
    with LLM(model, max_num_seqs=16, max_model_len=512, **engine_args) as llm, nice_sessions():
        vocab_size = llm.model_card.vocab_size
        submit(llm, make_workload(name, vocab_size, 0).requests)
        workload = make_workload(name, vocab_size, round_number)
        before = CpuTimes.now()
        wall_s, _ = submit(llm, workload.requests)
        foreign = CpuTimes.now().foreign_share_since(before)
    return {
        "output_tokens_per_s": round(workload.num_output_tokens / wall_s, 2),
        "foreign_cpu_share": round(foreign, 3),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small", help=f"folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help="by commas")
    parser.add_argument("--workload", default="W1", help="of workloads.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    name = arguments.model
    model = model_folder(name)
    engines = arguments.engines.split(",")
    rounds: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for number in range(1, arguments.rounds + 1):
        for engine in engines:
            rounds[engine].append(measure(model, engine, number, arguments.workload))
    summary: dict[str, Any] = {}
    for engine in engines:
        summary[engine] = {
            figure: spread([result[figure] for result in rounds[engine]])
            for figure in rounds[engine][0]
        }
        rate, foreign = summary[engine].values()
        print(
            f"{engine}: {rate['median']:.0f} output tok/s ({rate['min']:.0f}-{rate['max']:.0f}), "
            f"{foreign['median']:.0%} of the CPU went to others"
        )
    record = {
        **describe_run(),
        "model": Path(name).name,
        "workload": arguments.workload,
        "engines": summary,
    }
    write_report(arguments.out, record)


if __name__ == "__main__":
    main()
