"""The Python SDK is held against the scenarios that clients in other languages are held against."""

from __future__ import annotations

import sys

import pytest

from tests.clients import python_stream
from tests.clients.conftest import assert_conforms

pytestmark = pytest.mark.campaign


@pytest.mark.timeout(300)
def test_it_conforms() -> None:
    assert_conforms(sys.executable, python_stream.__file__)
