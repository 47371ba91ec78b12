"""Policies: order of requests, fair scheduling of sessions, and each step's token budget."""
