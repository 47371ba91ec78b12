"""What drafts gain: tokens a second with and without them, and whether the tokens are the same.

    python benchmarks/speculation.py [--model FOLDER] [--config '{"method": "suffix"}'] [--name N]

Two engines, of which one drafts, answer the same requests in turns, so only one of them works at a
time. Tasks, each with 1, 4 and 16 streams:

- copy: repeat a passage of this repository's documents, word for word.
- edit: write a function of this repository again, with a name changed.
- json: a record of a schema that was asked for before, at temperature 0.7.
- chat: short questions, as a user of a chat asks them.
- prose: stories at temperature 1, whose text hardly repeats itself.

The engines live through all repetitions, as in production, so what the drafting one has learned
stays; the first repetition of each task does not count. Writes
benchmarks/results/speculation-NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import report as own_report
from models import model_folder
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.client import AsyncEngineClient, SamplingParams, StructuredOutputsParams
from nanocore.client.chat.events import Finished, Text
from nanocore.demo_model import demo_model_folder

ROOT: Final = Path(__file__).parent.parent
STREAMS: Final = (1, 4, 16)
RECORD: Final = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "date_of_birth": {"type": "string", "format": "date"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 30},
                "city": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "postal_code"],
            "additionalProperties": False,
        },
        "newsletter": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "date_of_birth", "address", "newsletter"],
    "additionalProperties": False,
}
QUESTIONS: Final = (
    "What is the difference between a list and a tuple in Python?",
    "How do I boil an egg?",
    "Write a short email that asks a colleague for the minutes of Monday's meeting.",
    "Explain photosynthesis to a child.",
    "Give me five ideas for a weekend in the mountains.",
    "Why is the sky blue?",
    "What should I pack for a week at the sea?",
    "Summarise the plot of Romeo and Juliet.",
)


class Ask(NamedTuple):
    """A request: what the user says, and how it is answered."""

    text: str
    num_tokens: int
    sampling: dict[str, Any]


def asks(task: str, rng: random.Random) -> Iterator[Ask]:
    """Requests of a task without end, each one another."""
    passages = _passages()
    functions = [
        inspect.getsource(one)
        for _, one in inspect.getmembers(own_report, inspect.isfunction)
        if one.__module__ == own_report.__name__
    ]
    while True:
        seed = rng.randrange(2**31)
        match task:
            case "copy":
                text = f"Repeat the following text word for word.\n\n{rng.choice(passages)}"
                yield Ask(text, 160, {"temperature": 0.0})
            case "edit":
                code = rng.choice(functions)[:700]
                text = f"Write this code again, with the name `value` in place of `path`.\n\n{code}"
                yield Ask(text, 160, {"temperature": 0.0})
            case "json":
                wanted = StructuredOutputsParams(json=RECORD)
                sampling = {"temperature": 0.7, "seed": seed, "structured_outputs": wanted}
                yield Ask(f"Make up a customer, number {seed}. Answer in JSON.", 160, sampling)
            case "chat":
                text = f"{rng.choice(QUESTIONS)} Answer number {rng.randrange(1000)}."
                yield Ask(text, 160, {"temperature": 0.7, "seed": seed})
            case "prose":
                text = f"Tell a story about the number {seed}."
                yield Ask(text, 160, {"temperature": 1.0, "seed": seed})


def _passages() -> list[str]:
    """Paragraphs of the documents, of about a hundred words."""
    return [
        " ".join(part.split())
        for path in sorted((ROOT / "docs").glob("*.md"))
        for part in path.read_text().split("\n\n")
        if part[:1].isalpha() and 400 < len(part) < 700
    ]


class Timed(NamedTuple):
    """What streams took: seconds from their first text to their last; tokens, and the texts."""

    seconds: float
    num_tokens: int
    texts: list[str]


async def run_streams(client: AsyncEngineClient, batch: list[Ask]) -> Timed:
    """Answer so many requests at once."""

    async def one(ask: Ask) -> tuple[float, float, int, str]:
        params = SamplingParams(max_tokens=ask.num_tokens, **ask.sampling)
        first_s, num_tokens, text = 0.0, 0, ""
        async for event in client.chat([{"role": "user", "content": ask.text}], params):
            if isinstance(event, Text):
                first_s = first_s or time.perf_counter()
                text += event.delta
            elif isinstance(event, Finished):
                if event.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"{event.finish_reason}: {event.message}")
                num_tokens = event.usage.num_output_tokens
        return first_s, time.perf_counter(), num_tokens, text

    first, last, num_tokens, texts = zip(*await asyncio.gather(*map(one, batch)), strict=True)
    return Timed(max(last) - min(first), sum(num_tokens) - len(batch), list(texts))


async def measure(
    folder: str, config: dict[str, Any], tasks: list[str], repeats: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """All tasks on the two engines."""
    report: dict[str, Any] = {"num_requests": 0, "num_different": 0, "tasks": {}}
    async with AsyncExitStack() as stack:
        sides = {}
        for name, given in (("plain", {}), ("drafted", config)):
            launched = AsyncEngineClient.launch(
                folder, max_model_len=2048, max_num_seqs=32, speculative_config=given, **engine
            )
            sides[name] = await stack.enter_async_context(launched)
        for task in tasks:
            rng = random.Random(task)
            stream = asks(task, rng)
            for count in STREAMS:
                found: dict[str, list[float]] = {name: [] for name in sides}
                before = await sides["drafted"].stats()
                for number in range(repeats + 1):
                    batch = [next(stream) for _ in range(count)]
                    timed = {}
                    for name in sorted(sides, reverse=bool(number % 2)):
                        timed[name] = await run_streams(sides[name], batch)
                    for name, one in timed.items():
                        found[name] += [one.num_tokens / one.seconds] if number else []
                    pairs = zip(timed["plain"].texts, timed["drafted"].texts, strict=True)
                    report["num_requests"] += count
                    report["num_different"] += sum(one != other for one, other in pairs)
                after = await sides["drafted"].stats()
                gains = [d / p for p, d in zip(found["plain"], found["drafted"], strict=True)]
                report["tasks"][f"{task}, {count}"] = {
                    **{f"{name}_tokens_per_s": spread(found[name]) for name in sides},
                    "times_plain": spread(gains),
                    "tokens_per_step": (after.generation_tokens - before.generation_tokens)
                    / max(after.num_steps - before.num_steps, 1)
                    / count,
                }
                print(f"{task}, {count}: {with_range(spread(gains))} times", flush=True)
    return report


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(demo_model_folder()), help="default: the demo model")
    parser.add_argument("--config", type=json.loads, default={"method": "suffix"})
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine arguments")
    parser.add_argument("--tasks", default="copy,edit,json,chat,prose")
    parser.add_argument("--repeats", type=positive, default=8)
    parser.add_argument("--name", default="demo")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = (
        arguments.model if Path(arguments.model).exists() else str(model_folder(arguments.model))
    )
    tasks = arguments.tasks.split(",")
    report = {
        **describe_run(("nanocore", "torch", "llguidance")),
        "model": arguments.name,
        "config": arguments.config,
        "engine": arguments.engine,
        **asyncio.run(
            measure(folder, arguments.config, tasks, arguments.repeats, arguments.engine)
        ),
    }
    rows = [
        [name, with_range(one["plain_tokens_per_s"]), with_range(one["drafted_tokens_per_s"]),
         with_range(one["times_plain"]), f"{one['tokens_per_step']:.2f}"]
        for name, one in report["tasks"].items()
    ]  # fmt: skip
    print(table([["task, streams", "plain tok/s", "drafted tok/s", "times", "tokens/step"], *rows]))
    print(f"{report['num_different']} of {report['num_requests']} answers differ")
    out = arguments.out or ROOT / f"benchmarks/results/speculation-{arguments.name}.json"
    write_report(out, report)


if __name__ == "__main__":
    main()
