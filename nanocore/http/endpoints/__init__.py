"""Endpoints that generate nothing: what the server and its engine are, and how they fare."""
