"""Cases that only `make test-all` runs: what they show, cheaper ones beside them show as well."""

from __future__ import annotations

from typing import Any

import pytest


def in_campaign(*cases: Any) -> list[Any]:
    """Parameters of a test, for the campaign alone; a tuple is one case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign)
        for case in cases
    ]
