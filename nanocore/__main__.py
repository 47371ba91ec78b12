"""`python -m nanocore` is `nanocore`."""

from nanocore.cli.main import main

main()
