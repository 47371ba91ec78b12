"""Outputs of the demo model at temperature 1 for all schemas of the corpus: do all parse?

    python -m tests.structured.many_outputs [--outputs 10000] [--json FILE]

Schemas take turns; each is asked for with and without white space. A third is as the model likes
it; the others are steered to an end by biases, because a small model that knows little JSON rarely
ends what has no bound. What finishes with "stop" must be valid.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from benchmarks.report import describe_run, write_report
from nanocore.client import LLM, SamplingParams, StructuredOutputsParams
from nanocore.client.requests.request_outputs import CompletionOutput
from nanocore.client.tokenizer import Tokenizer
from tests.structured.corpus import SCHEMAS
from tests.structured.validity import exact_validator, why_invalid

MAX_TOKENS: Final = 512
STEERING: Final = 8.0
ENDINGS: Final = '",]}'
NO_ENDINGS: Final = "0123456789{["
QUESTIONS: Final = (
    *("Hello!", "Who are you?", "What is 12 plus 7?", "Sort: pear apple fig", "Spell goat."),
)
STYLES: Final = [(compact, steered) for compact in (False, True) for steered in (False, True, True)]


@dataclass(frozen=True)
class Totals:
    """What all outputs came to.

    num_finished: with "stop"; num_valid: of these. wrong: [schema's name, text, why] of the others.
    by_finish_reason: how many. errors: [schema's name, message]. never_finished: names of schemas.
    """

    num_outputs: int
    num_schemas: int
    num_finished: int
    num_valid: int
    by_finish_reason: dict[str, int]
    wrong: list[tuple[str, str, str]]
    errors: list[tuple[str, str]]
    never_finished: list[str]
    output_tokens: int
    duration_s: float
    num_preemptions: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


@dataclass(frozen=True)
class Wanted:
    """One output that is asked for."""

    name: str
    question: str
    params: SamplingParams


def ask(num_outputs: int, tokenizer: Tokenizer) -> list[Wanted]:
    """The same ones each time; each has a seed of its own."""
    bias = {
        tokenizer.encode(text)[0]: strength
        for texts, strength in ((ENDINGS, STEERING), (NO_ENDINGS, -STEERING))
        for text in texts
    }
    names = [*SCHEMAS]
    wanted = []
    for i in range(num_outputs):
        turn, place = divmod(i, len(names))
        compact, steered = STYLES[(place + turn) % len(STYLES)]
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=MAX_TOKENS,
            logit_bias=bias if steered else None,
            structured_outputs=StructuredOutputsParams(
                json=SCHEMAS[names[place]], disable_any_whitespace=compact
            ),
        )
        wanted.append(Wanted(names[place], QUESTIONS[i % len(QUESTIONS)], params))
    return wanted


@cache
def validator_of(name: str) -> Draft202012Validator:
    return exact_validator(SCHEMAS[name])


def generate(num_outputs: int, **engine_args: Any) -> Totals:
    """So many outputs of an engine of its own."""
    with LLM(**engine_args) as llm:
        wanted = ask(num_outputs, llm.get_tokenizer())
        start = time.perf_counter()
        conversations = [[{"role": "user", "content": one.question}] for one in wanted]
        outputs = llm.chat(conversations, [one.params for one in wanted], use_tqdm=False)
        duration_s = time.perf_counter() - start
        num_preemptions = llm.stats().num_preemptions
    names, samples = [one.name for one in wanted], [one.outputs[0] for one in outputs]
    return judge(names, samples, duration_s, num_preemptions)


def judge(
    names: list[str], outputs: list[CompletionOutput], duration_s: float, num_preemptions: int
) -> Totals:
    """names: of the outputs' schemas."""
    wrong, errors = [], []
    finished: Counter[str] = Counter()
    for name, output in zip(names, outputs, strict=True):
        if output.finish_reason == "stop":
            finished[name] += 1
            reason = why_invalid(validator_of(name), output.text)
            if reason is not None:
                wrong.append((name, output.text, reason))
        elif output.finish_reason != "length":
            errors.append((name, output.message or ""))
    return Totals(
        num_outputs=len(outputs),
        num_schemas=len({*names}),
        num_finished=finished.total(),
        num_valid=finished.total() - len(wrong),
        by_finish_reason=dict(Counter(str(output.finish_reason) for output in outputs)),
        wrong=wrong,
        errors=errors,
        never_finished=sorted({*names} - {*finished}),
        output_tokens=sum(output.num_tokens for output in outputs),
        duration_s=duration_s,
        num_preemptions=num_preemptions,
    )


def main() -> None:
    """Exit with 1 if an output that finished is not valid, or one ended with an error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--outputs", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write what came of it here, too")
    args = parser.parse_args()
    totals = generate(args.outputs)
    print(
        f"{totals.num_outputs} outputs of {totals.num_schemas} schemas in "
        f"{totals.duration_s:.0f} s, {totals.tokens_per_s:.0f} tokens/s\n"
        f"{totals.by_finish_reason}: "
        f"{totals.num_valid} of {totals.num_finished} that finished are valid; "
        f"no output finished of {totals.never_finished}"
    )
    for failure in totals.wrong + totals.errors:
        print(*failure, sep="\n  ")
    if args.json:
        figures = {**asdict(totals), "tokens_per_s": totals.tokens_per_s}
        write_report(args.json, {**describe_run(), "max_tokens": MAX_TOKENS, **figures})
    sys.exit(bool(totals.wrong or totals.errors))


if __name__ == "__main__":
    main()
