"""The engine as a process: its start and its end, its parent."""
