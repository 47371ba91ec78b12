"""What an HTTP server costs beside the model: ours, vLLM's, and a bare write of the same bytes.

    python benchmarks/http_server.py [--vllm-python PATH] [--only chat_256,requests] [--passes 3]

Each server has an engine without a model (`http_engine.py`, `http_vllm.py`), whose tokens are those
of a real text, at a given pace; `http_floor.py` has none. All are started once, pinned with the
load (`http_load.py`) to two cores, and take turns. CPU times are of the server without its engine,
and of ours with the processes that render templates.

API_N          N streams, at a pace that every server can keep: microseconds of CPU a token and a
               chunk, while all streams run
API_N_fast     the same as fast as the engine goes, from the first request to the last end: tokens
               pile up, and come merged
requests_P_M   chats of P tokens that are all cached, answered with M at once, 32 at a time:
               milliseconds of CPU, and requests a second

Prints medians, and writes benchmarks/results/http.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from http_sides import FLOOR, OURS, VLLM, Side, start_floor, start_ours, start_vllm
from no_model import write_pace
from overhead_wire import TEXT, demo_folder
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.client.tokenizer import Tokenizer

RESULTS: Final = Path(__file__).parent / "results"
PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECTIONS: Final = 32
_LOAD_TIMEOUT_S: Final = 600
Figures = dict[str, float]


class Case(NamedTuple):
    """A line of the table. num: streams, or requests. step_s: of the engine. num_tokens: of each
    answer. prompt_tokens: of each request, about so many."""

    api: str
    num: int
    step_s: float
    num_tokens: int
    prompt_tokens: int = 100
    streams: bool = True


CASES: Final = {
    **{
        f"{api}_{num}{name}": Case(api, num, step_s, num_tokens)
        for api in PATHS
        for num, name, step_s, num_tokens in (
            (1, "", 0.002, 512), (64, "", 0.01, 512), (256, "", 0.04, 512), (256, "_fast", 0, 1024)
        )
    },
    **{
        f"requests_{prompt}_{num_tokens}": Case("chat", 512, 0.0, num_tokens, prompt, False)
        for prompt, num_tokens in ((128, 1), (1024, 1), (1024, 16))
    },
}  # fmt: skip


class Bench:
    """What cases are measured with. scale: of how many streams, requests and tokens there are."""

    def __init__(self, folder: Path, scale: float) -> None:
        self._pace, self._scale = folder / "pace", scale
        self._chunks: dict[str, str] = {}  # of our server, by API
        self._tokenizer = Tokenizer.from_folder(demo_folder())
        self._text_ids = self._tokenizer.encode(TEXT, add_special_tokens=False)
        (folder / "tokens.json").write_text(json.dumps(self._text_ids))
        write_pace(self._pace, 0.0)

    def measure(self, side: Side, case: Case) -> Figures:
        """The case's figures; none if the side has no such thing."""
        if side.name == FLOOR and (case.step_s == 0 or case.api not in self._chunks):
            return {}
        write_pace(self._pace, case.step_s)
        return self._streams(side, case) if case.streams else self._requests(side, case)

    def _streams(self, side: Side, case: Case) -> Figures:
        num, num_tokens = self._scaled(case.num), max(32, self._scaled(case.num_tokens))
        job: dict[str, Any] = {"tokens": num_tokens, "is_steady": case.step_s > 0, "text": TEXT}
        if side.name == FLOOR:
            bodies = [{"chunk": self._chunks[case.api], "num": num_tokens}] * num
            job["text"] = None
        else:
            bodies = [self._body(case, i, num_tokens) for i in range(num)]
        found = self._load(side, case, job | {"bodies": bodies})
        if side.name == OURS and case.step_s > 0:
            self._chunks[case.api] = found["chunk"]
        tokens, chunks = found["tokens"], found["chunks"]
        return {
            "us_per_token": found["cpu_s"] / tokens * 1e6,
            "us_per_chunk": found["cpu_s"] / chunks * 1e6,
            "tokens_per_chunk": tokens / chunks,
            "tokens_per_s": tokens / found["wall_s"],
            "load_us_per_chunk": found["own_cpu_s"] / chunks * 1e6,
        }

    def _requests(self, side: Side, case: Case) -> Figures:
        bodies = [self._body(case, i, case.num_tokens) for i in range(CONNECTIONS)]
        job = {"tokens": case.num_tokens, "bodies": bodies, "connections": CONNECTIONS}
        self._load(side, case, job | {"num": CONNECTIONS})  # the cache is warm from then on
        found = self._load(side, case, job | {"num": max(CONNECTIONS, self._scaled(case.num))})
        return {
            "cpu_ms": found["cpu_s"] / found["requests"] * 1e3,
            "requests_per_s": found["requests"] / found["wall_s"],
            "p50_ms": found["p50_ms"],
            "prompt_tokens": found["prompt_tokens"],
        }

    def _body(self, case: Case, number: int, num_tokens: int) -> dict[str, Any]:
        """A request whose prompt begins as no other one does."""
        ids = self._text_ids * (1 + case.prompt_tokens // len(self._text_ids))
        text = f"{number}: {self._tokenizer.decode(ids[: case.prompt_tokens])}"
        body: dict[str, Any] = {"model": "demo", "max_tokens": num_tokens, "ignore_eos": True}
        if case.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": text}]
        return body | ({"messages": messages} if case.api == "chat" else {"prompt": text})

    def _load(self, side: Side, case: Case, job: dict[str, Any]) -> dict[str, Any]:
        job |= {"port": side.port, "path": PATHS[case.api], "pids": side.pids()}
        result = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("http_load.py"))],
            input=json.dumps(job), capture_output=True, text=True, check=False,
            timeout=_LOAD_TIMEOUT_S,
        )  # fmt: skip
        if result.returncode:
            sys.exit(f"http_server.py: {side.name}: the load failed:\n{result.stderr}")
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def _scaled(self, number: int) -> int:
        return max(1, round(number * self._scale))


def main() -> None:
    """Measure, print and write."""
    arguments = _parse_arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = describe_run(("nanocore", "httptools", "uvloop", "msgspec"))
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    with _sides(arguments) as (bench, sides):
        for side in sides:  # imports, templates, caches
            for api in sorted({CASES[key].api for key in arguments.only}):
                bench.measure(side, Case(api, num=8, step_s=0.002, num_tokens=64))
        for number, key in product(range(arguments.passes), arguments.only):
            print(f"pass {number + 1} of {arguments.passes}: {key}", file=sys.stderr)
            for side in sides:
                for name, value in bench.measure(side, CASES[key]).items():
                    case = values.setdefault(side.name, {}).setdefault(key, {})
                    case.setdefault(name, []).append(value)
        report["vllm_versions"] = next((s.versions for s in sides if s.name == VLLM), None)
    report["unit"] = "CPU without the engine's: microseconds a token or chunk, ms a request"
    for side_name, cases in values.items():
        report[side_name] = {
            key: {name: spread(figures) for name, figures in case.items()}
            for key, case in cases.items()
        }
    print(_table(report, arguments.only))
    write_report(arguments.out, report)


@contextmanager
def _sides(arguments: argparse.Namespace) -> Iterator[tuple[Bench, list[Side]]]:
    """What is measured, in the order of turns."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp"))
        folder = Path(name)
        bench = Bench(folder, arguments.scale)
        sides = [stack.enter_context(start_ours(folder))]
        sides.append(stack.enter_context(start_floor(folder)))
        if arguments.vllm_python:
            sides.append(stack.enter_context(start_vllm(folder, arguments.vllm_python)))
        yield bench, sides


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES),
                        metavar="A,B", help="beginnings of keys")  # fmt: skip
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    parser.add_argument("--passes", type=positive, default=3, help="of all cases, alternately")
    parser.add_argument("--scale", type=float, default=1.0,
                        help="of the numbers of streams, tokens and requests")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "http.json")
    arguments = parser.parse_args()
    if arguments.vllm_python and shutil.which(arguments.vllm_python) is None:
        parser.error(f"--vllm-python {arguments.vllm_python}: not an executable file")
    meant = [key for key in CASES if any(f"{key}_".startswith(f"{n}_") for n in arguments.only)]
    if not meant:
        parser.error(f"--only: unknown {','.join(arguments.only)}; known: {', '.join(CASES)}")
    arguments.only = meant
    return arguments


def _table(report: dict[str, Any], keys: list[str]) -> str:
    """Medians with their ranges."""
    sides = [name for name in (OURS, FLOOR, VLLM) if name in report]
    rows = [["", *sides]]
    for key in keys:
        names = ("cpu_ms", "requests_per_s") if "requests" in key else _STREAM_FIGURES
        for name in names:
            cells = [report[side].get(key, {}).get(name) for side in sides]
            rows.append([f"{key} {name}", *(with_range(c) if c else "" for c in cells)])
    text: str = table(rows)
    return text


_STREAM_FIGURES: Final = ("us_per_token", "us_per_chunk", "tokens_per_chunk", "tokens_per_s")


if __name__ == "__main__":
    main()
