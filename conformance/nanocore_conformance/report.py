"""What checks found: one result each, as text for people and as JSON for programs.

A check passes by returning. It raises `BrokenError` with what the protocol expects and what came
instead, or `SkippedError` with the reason why this peer cannot be asked. Anything else that it
raises is a defect of ours and is not caught.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Generic, Literal, TypeVar

import msgspec

Tested = TypeVar("Tested")
_MAX_SHOWN_CHARS = 300


class BrokenError(Exception):
    """The peer did not do what the protocol says."""

    def __init__(self, expected: str, got: object) -> None:
        text = str(got)
        self.expected = expected
        self.got = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
        super().__init__(f"expected {self.expected}; got {self.got}")


class SkippedError(Exception):
    """The check does not apply to this peer."""


def require(ok: bool, expected: str, got: object) -> None:
    """Raise `BrokenError` unless ok."""
    if not ok:
        raise BrokenError(expected, got)


class Check(msgspec.Struct, Generic[Tested], frozen=True):
    """One named check. section: the title in PROTOCOL.md that it stands under.

    flag: of the command line, without which it is not run; empty: it always is.
    """

    name: str
    section: str
    meaning: str
    body: Callable[[Tested], None]
    slow: bool = False
    flag: str = ""


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one check found. got: of a failure; why: of a skipped check."""

    name: str
    section: str
    outcome: Literal["pass", "fail", "skip"]
    duration_s: float
    expected: str | None = None
    got: str | None = None
    why: str | None = None

    def __str__(self) -> str:
        match self.outcome:
            case "pass":
                return f"pass  {self.name}"
            case "skip":
                return f"skip  {self.name}: {self.why}"
            case _:
                return (
                    f"FAIL  {self.name} (PROTOCOL.md, {self.section})\n"
                    f"      expected: {self.expected}\n"
                    f"      got:      {self.got}"
                )


class Checks(Generic[Tested]):
    """A list of checks that functions join by `@checks.add(section)`.

    The name is the function's with hyphens, the meaning its docstring.
    """

    def __init__(self) -> None:
        self.all: list[Check[Tested]] = []

    def add(
        self, section: str, *, slow: bool = False, flag: str = ""
    ) -> Callable[[Callable[[Tested], None]], Callable[[Tested], None]]:
        """section: a title of PROTOCOL.md. slow: it waits out a time limit of the protocol.

        flag: see `Check`.
        """

        def join(body: Callable[[Tested], None]) -> Callable[[Tested], None]:
            meaning = re.sub(r"\s+", " ", body.__doc__ or "").strip()
            name = body.__name__.replace("_", "-")
            self.all.append(Check(name, section, meaning, body, slow, flag))
            return body

        return join


def run_check(check: Check[Tested], tested: Tested) -> Result:
    """Run one check."""
    start_s = time.monotonic()
    expected = got = why = None
    outcome: Literal["pass", "fail", "skip"] = "pass"
    try:
        check.body(tested)
    except BrokenError as error:
        outcome, expected, got = "fail", error.expected, error.got
    except SkippedError as error:
        outcome, why = "skip", str(error)
    duration_s = round(time.monotonic() - start_s, 3)
    return Result(check.name, check.section, outcome, duration_s, expected, got, why)


def summary(results: Iterable[Result]) -> str:
    """How many passed, failed and were skipped."""
    outcomes = [result.outcome for result in results]
    return ", ".join(
        f"{outcomes.count(outcome)} {word}"  # type: ignore[arg-type]
        for outcome, word in (("pass", "passed"), ("fail", "failed"), ("skip", "skipped"))
    )


def as_json(peer: str, results: list[Result]) -> str:
    """The report for programs. peer: "engine" or "client"."""
    report = {
        "peer": peer,
        "conforms": all(result.outcome != "fail" for result in results),
        "results": results,
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
