"""`python -m nanocore.engine_core` is `nanocore-engine`."""

from nanocore.engine_core.cli import main

main()
