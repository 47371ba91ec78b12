"""nanocore.cli: the `nanocore` command and its subcommands."""
