"""The compiled proposers of this machine."""

from __future__ import annotations

import pytest

from nanocore.kernels.cpu import library


@pytest.fixture(scope="session")
def native() -> library.Library:
    found = library.find_library()
    if found is None:
        pytest.skip("no kernels were compiled")
    return found
