"""Drivers of engines: each is a process that answers runs, see benchmarks/peers/line_protocol."""
