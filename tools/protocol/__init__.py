"""Keeps PROTOCOL.md and schema.json in step with the code: `python -m tools.protocol`."""
