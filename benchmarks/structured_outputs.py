"""What structured outputs cost: a step of streams, a request's first token, and other requests.

    python benchmarks/structured_outputs.py [--model small] [--parts step,schema,evil]

One engine and one client; all that is compared takes turns in it.

- step: decode time per token of 16 streams, plain ones and ones that write JSON without end.
- schema: time to first token of single requests: plain, with a schema that the engine knows, and
  with one that it has never seen.
- evil: time between tokens of 8 plain streams while another client sends a request a second: plain
  ones, or schemas that take as long as any.

Models with random weights have no tokenizer, so one is made: byte-level BPE of random merges, as
large as the vocabulary. Writes benchmarks/results/structured-outputs-MODEL.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
from models import model_folder
from report import describe_run, positive, spread, table, with_range, write_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanocore.client import (
    AsyncEngineClient,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputsParams,
)

RESULTS: Final = Path(__file__).parent / "results"
NUM_STREAMS, NUM_BYSTANDERS, NUM_PROMPT_TOKENS, NUM_TOKENS = 16, 8, 32, 64
RECORD: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4},
        "age": {"type": "integer"},
        "when": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
        "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "age", "when", "tags", "score"],
    "additionalProperties": False,
}
ENDLESS: Final = {"type": "array", "items": RECORD, "minItems": 1000}
_RULES: Final = "\n".join(f'r{i}: "x{i % 7}" r{(i + 1) % 1900}?' for i in range(1900))
EVIL: Final[tuple[dict[str, Any], ...]] = (
    {"json": {"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {"type": "string"}}} for k in "ab"]}
                        for i in range(20)]}},
    {"regex": "((((((a{100}){100}){100}){100}){100}){100}){100}"},
    {"regex": "((" * 3000 + "a" + "))" * 3000},
    {"json": {"type": "integer", "multipleOf": 7919, "minimum": 0, "maximum": 99999999999}},
    {"grammar": f"start: {' | '.join(f'r{i}' for i in range(1900))}\n{_RULES}"},
    {"regex": "(.*a.{12}){2}[bc](.*d.{12}){2}"},
    {"choice": [f"{i:x}" * 4 for i in range(4000)]},
)  # fmt: skip


@contextmanager
def with_tokenizer(folder: Path) -> Iterator[Path]:
    """The model's folder with a tokenizer, made if it has none."""
    if (folder / "tokenizer.json").exists():
        yield folder
        return
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as made:
        for path in folder.iterdir():
            (Path(made) / path.name).symlink_to(path.resolve())
        config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": vocab_size - 1}
        (Path(made) / "config.json").unlink()
        (Path(made) / "config.json").write_text(json.dumps(config))
        make_tokenizer(vocab_size).save(str(Path(made) / "tokenizer.json"))
        yield Path(made)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Merges of letters, digits, JSON's punctuation and spaces; the last token is special."""
    rng, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    letters = [c for c in alphabet if c.isascii() and (c.isalnum() or c in '{}[]":,._-')] + ["Ġ"]
    pool, merges = [*letters], []
    while len(vocab) < vocab_size - 1:
        left, right = rng.choice(pool), rng.choice(letters if rng.random() < 0.7 else pool)
        if left + right not in vocab and len(left + right) <= 12:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            pool.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


class Run:
    """Requests of one client, on prompts that nobody has sent before."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self._rng = random.Random(0)

    async def times_s(self, num_tokens: int, **sampling: Any) -> list[float]:
        """Of one request: when it was sent, and when each of its tokens came."""
        vocab_size = self._client.model_card.vocab_size
        prompt = self._rng.choices(range(vocab_size - 1), k=NUM_PROMPT_TOKENS)
        params = SamplingParams(
            max_tokens=num_tokens, detokenize=False, ignore_eos=True, **sampling
        )
        times = [time.perf_counter()]
        async for output in self._client.generate(prompt, params):
            if output.outputs[0].finish_reason == "error":
                raise InvalidRequestError(output.outputs[0].message)
            num_new = output.outputs[0].num_tokens - (len(times) - 1)
            times += [time.perf_counter()] * num_new
        return times

    async def streams(self, count: int, num_tokens: int, **sampling: Any) -> list[list[float]]:
        """Likewise of so many requests at once."""
        return await asyncio.gather(*(self.times_s(num_tokens, **sampling) for _ in range(count)))


async def measure_step(run: Run, repeats: int) -> dict[str, Any]:
    """Milliseconds per token and stream, from the second token on."""
    json_text = StructuredOutputsParams(json=ENDLESS)
    cases = {"plain": {}, "structured": {"structured_outputs": json_text}}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        for name, sampling in sorted(cases.items(), reverse=bool(number % 2)):
            streams = await run.streams(NUM_STREAMS, NUM_TOKENS, temperature=0.8, **sampling)
            spent_s = [(times[-1] - times[1]) / (len(times) - 2) for times in streams]
            found[name] += [float(np.median(spent_s)) * 1e3] if number else []
    ratios = [s / p for p, s in zip(found["plain"], found["structured"], strict=True)]
    return {**{f"{n}_ms": spread(v) for n, v in found.items()}, "times_plain": spread(ratios)}


async def measure_schema(run: Run, num_schemas: int) -> dict[str, Any]:
    """Milliseconds to the first token, percentiles over single requests."""
    found: dict[str, list[float]] = {"plain": [], "known": [], "new": []}
    for i in range(num_schemas):
        properties = {f"field_{i}_{k}": {"type": "string"} for k in range(i % 20)}
        new = {**RECORD, "properties": {**RECORD["properties"], **properties}}
        cases = {"plain": None, "new": new, "known": new}
        for name, schema in cases.items():
            wanted = schema and StructuredOutputsParams(json=schema)
            sent, first, *_ = await run.times_s(2, temperature=0, structured_outputs=wanted)
            found[name].append((first - sent) * 1e3)
    return {f"{name}_ttft_ms": _percentiles(values) for name, values in found.items()}


async def measure_evil(run: Run, repeats: int) -> dict[str, Any]:
    """Milliseconds between the tokens of bystanders, percentiles over all."""
    found: dict[str, list[float]] = {"beside_plain": [], "beside_evil": []}
    outcomes: dict[str, int] = {}
    evil = (_evil(number) for number in count())
    for _ in range(repeats):
        for name in found:
            wanted = evil if name == "beside_evil" else repeat(None)
            pest = asyncio.create_task(_send_each_second(run, wanted, outcomes))
            streams = await run.streams(NUM_BYSTANDERS, 8 * NUM_TOKENS, temperature=0.8)
            pest.cancel()
            await asyncio.gather(pest, return_exceptions=True)
            for _, *times in streams:
                found[name] += [(b - a) * 1e3 for a, b in pairwise(times)]
    return {**{f"{n}_itl_ms": _percentiles(v) for n, v in found.items()}, "outcomes": outcomes}


async def _send_each_second(
    run: Run, all_wanted: Iterator[StructuredOutputsParams | None], outcomes: dict[str, int]
) -> None:
    for wanted in all_wanted:
        next_second = asyncio.create_task(asyncio.sleep(1.0))
        try:
            await run.times_s(16, temperature=1.0, structured_outputs=wanted)
            outcome = "plain" if wanted is None else "answered"
        except InvalidRequestError as error:
            outcome = f"refused: {str(error)[:60]}"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        await next_second


def _evil(number: int) -> StructuredOutputsParams:
    """One that the engine has never seen."""
    wanted = dict(EVIL[number % len(EVIL)])
    if "regex" in wanted:
        wanted["regex"] += f"|{number}"
    elif "grammar" in wanted:
        wanted["grammar"] += f"\nunused: /{number}/"
    elif "choice" in wanted:
        wanted["choice"] = [*wanted["choice"], f"number {number}"]
    else:
        wanted["json"] = {**wanted["json"], "title": str(number)}
    return StructuredOutputsParams(**wanted)


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99, most = np.percentile(values, [50, 90, 99, 100]).round(3).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": most, "num_values": len(values)}


async def measure(folder: Path, parts: list[str], repeats: int, schemas: int) -> dict[str, Any]:
    """All parts on one engine."""
    report: dict[str, Any] = {}
    async with AsyncEngineClient.launch(str(folder), max_model_len=1024, max_num_seqs=64) as client:
        run = Run(client)
        await run.times_s(2)
        if "step" in parts:
            report["step"] = await measure_step(run, repeats)
        if "schema" in parts:
            report["schema"] = await measure_schema(run, schemas)
        if "evil" in parts:
            report["evil"] = await measure_evil(run, repeats)
    return report


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--parts", default="step,schema,evil")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--schemas", type=positive, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name = Path(arguments.model).name
    report = {**describe_run(("nanocore", "torch", "llguidance")), "model": name}
    with with_tokenizer(model_folder(arguments.model)) as folder:
        parts = arguments.parts.split(",")
        report |= asyncio.run(measure(folder, parts, arguments.repeats, arguments.schemas))
    if "step" in report:
        rows = [[f"{NUM_STREAMS} streams", ""]]
        print(table([*rows, *([key, with_range(f)] for key, f in report["step"].items())]))
    for part in ("schema", "evil"):
        for key, found in report.get(part, {}).items():
            print(key, found)
    write_report(arguments.out or RESULTS / f"structured-outputs-{name}.json", report)


if __name__ == "__main__":
    main()
