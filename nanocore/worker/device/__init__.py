"""Steps on a device beside the host: its memory, its queue of work, captured graphs."""
