"""`python -m nanocore.conformance` is `nanocore-conformance`."""

from __future__ import annotations

from nanocore.conformance.cli import main

main()
