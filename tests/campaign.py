"""Cases that only `make test-all` runs: what they show, cheaper ones beside them show as well.

So it is with most examples of a property: `make test` (`-m "not campaign"`) draws a fifth of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_SHARE = 5
_MIN_EXAMPLES = 2
_deselects_campaign = False


def configure(config: pytest.Config) -> None:
    """Before any test is collected: does this run leave the campaign out?"""
    global _deselects_campaign
    _deselects_campaign = "not campaign" in config.option.markexpr


def in_campaign(*cases: Any) -> list[Any]:
    """Parameters of a test, for the campaign alone; a tuple is one case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign)
        for case in cases
    ]


def some_of(cases: Iterable[T], step: int, first: int) -> list[T]:
    """One case in `step`, from `first` on; all of them unless the campaign is out."""
    return list(cases)[first % step :: step] if _deselects_campaign else list(cases)


def examples(number: int) -> int:
    """How many examples of a property Hypothesis draws: all of them unless the campaign is out."""
    return max(_MIN_EXAMPLES, number // _SHARE) if _deselects_campaign else number
