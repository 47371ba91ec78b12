"""What streams lose when their engine is killed, and how long they stand still.

    python benchmarks/resume.py [--kills 50] [--ranks 1,2]

A client launches an engine, keeps a stream of each kind open, and kills the engine: at a random
time after all streams move again. What each stream answered is compared with the undisturbed answer
to the same request, token for token and letter for letter. Times are those from a kill to the next
token of each stream that was open, and their parts: until the client knows, until an engine serves,
until the token. All of it without and with `standby`; the next engine to stand by has time to load
before the next kill. Writes benchmarks/results/resume.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final

from kill_storm import PARTS, Storm, Tally, WatchedClient, stream_kinds
from models import model_folder
from report import describe_run, positive, table, write_report

RESULTS: Final = Path(__file__).parent / "results" / "resume.json"
LOAD_S: Final = 3.0  # of each rank of an engine that stands by, generously


async def measure(
    model: Path | None, ranks: int, standby: bool, kills: int, tokens: int, rest_s: float
) -> Tally:
    """One launched engine, killed so often. rest_s: at least, between the kills."""
    client = WatchedClient.launch(
        model,
        resume=True,
        max_restarts=10**6,
        standby=standby,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=2**26,
    )
    async with client:
        return await Storm(client, tokens, rest_s, f"{ranks} {standby}").run(kills)


def measure_all(model: Path | None, ranks: list[int], kills: int, tokens: int) -> dict[str, Any]:
    """Figures of each number of ranks, without and with an engine that stands by."""
    figures = {}
    for number in ranks:
        for standby in (False, True):
            name = f"tp {number}{', standby' if standby else ''}"
            start_s = time.monotonic()
            rest_s = number * LOAD_S if standby else 0.0
            tally = asyncio.run(measure(model, number, standby, kills, tokens, rest_s))
            figures[name] = tally.figures()
            print(f"{name}: {time.monotonic() - start_s:.0f} s", file=sys.stderr)
    return figures


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a shape of models.py or a folder (default: the demo)")
    parser.add_argument("--kills", type=positive, default=50, help="of each engine")
    parser.add_argument("--ranks", default="1,2", help="by commas")
    parser.add_argument("--tokens", type=positive, default=900, help="of each stream")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    ranks = [int(number) for number in arguments.ranks.split(",")]
    report = {
        **describe_run(),
        "model": arguments.model or "demo",
        "streams": list(stream_kinds(1)),
    }
    model = model_folder(arguments.model) if arguments.model else None
    report["engines"] = measure_all(model, ranks, arguments.kills, arguments.tokens)
    rows = [["milliseconds, median (p90, max)", *PARTS.values()]]
    for name, figures in report["engines"].items():
        rows.append([name, *map(spell, (figures[part] for part in PARTS))])
    print(table(rows))
    write_report(arguments.out, report)


def spell(times: dict[str, float]) -> str:
    """A cell of the table."""
    return f"{times['median']:.0f} ({times['p90']:.0f}, {times['max']:.0f})"


if __name__ == "__main__":
    main()
