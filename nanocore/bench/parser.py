"""What the command lines of all benchmarks share: a parser that raises, and kinds of values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from nanocore.protocol.errors import ConfigError


class BenchParser(argparse.ArgumentParser):
    """Raises ConfigError for what cannot be parsed, in one line."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise ConfigError(f"{message} ({self.prog} --help lists the flags)")


def at_least(least: int) -> Callable[[str], int]:
    """A whole number."""

    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")

    return number


def above_zero(text: str) -> float:
    """A number, or infinity."""
    value = any_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def any_number(text: str) -> float:
    """A number, or infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object") from None


def range_ratio(text: str) -> tuple[float, float]:
    """Of input and output lengths: one number, or {"input": 0.3, "output": 0.5}."""
    try:
        value = msgspec.json.decode(text, type=float | dict[str, float])
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
    except (msgspec.MsgspecError, ValueError, KeyError):
        pair = (math.nan, math.nan)
    if all(0 <= ratio < 1 for ratio in pair):
        return pair
    raise argparse.ArgumentTypeError(
        f'{text!r}: a number from 0 to below 1, or {{"input": 0.3, "output": 0.5}}'
    )


def percentiles(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 100, by commas."""
    numbers = tuple(any_number(part) for part in text.split(","))
    if all(0 <= number <= 100 for number in numbers):
        return numbers
    raise argparse.ArgumentTypeError(f"{text!r}: percentiles are from 0 to 100")


def pairs(flag: str, texts: Sequence[str], separator: str) -> dict[str, str]:
    """KEY and VALUE of each.

    Raises:
        ConfigError: the separator is missing, or a key is empty.
    """
    split = [text.partition(separator) for text in texts]
    wrong = [
        text for text, (key, found, _) in zip(texts, split, strict=True) if not key or not found
    ]
    if wrong:
        raise ConfigError(f"{flag} {wrong[0]}: write KEY{separator}VALUE")
    return {key.strip(): value.strip() for key, _, value in split}
