"""Proposers of speculative decoding that run in the engine's process, one a file."""
