"""Every page of the documents, run as it stands, in namespaces of its own."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, documents
from tests.docs.run_page import are_possible, in_namespaces

TIMEOUT_S = 900
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(TIMEOUT_S + 10),
    pytest.mark.skipif(not are_possible(), reason="this machine gives us no namespaces"),
]


@pytest.mark.parametrize(
    "page", [page for page in documents() if any(block.is_run for block in blocks(page))]
)
def test_a_page_does_what_it_says(page: str) -> None:
    done = in_namespaces(page, TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
