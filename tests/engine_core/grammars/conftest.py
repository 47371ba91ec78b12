"""The vocabulary that most tests of grammars compile for."""

from __future__ import annotations

import pytest

from nanocore.engine_core.grammars.token_table import TokenTable
from tests.engine_core.grammars.walks import demo_vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> TokenTable:
    return demo_vocabulary()
