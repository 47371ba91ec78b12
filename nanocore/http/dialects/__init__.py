"""Dialects of HTTP APIs: each reads its own requests, and encodes the same events in its own
form."""
