"""`python -m nanocore_conformance` is `nanocore-conformance`."""

from __future__ import annotations

from nanocore_conformance.cli import main

main()
