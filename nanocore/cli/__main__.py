"""`python -m nanocore.cli` is `nanocore`."""

from nanocore.cli.main import main

main()
