"""All scenarios for clients, those that go well first: importing the modules adds them."""

from __future__ import annotations

from nanocore_conformance import client_failures, client_streams  # noqa: F401 - they add theirs
from nanocore_conformance.client_under_test import CLIENT_SCENARIOS

__all__ = ["CLIENT_SCENARIOS"]
