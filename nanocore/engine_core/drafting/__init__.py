"""Speculative decoding in the engine: what decodes compute behind their tokens."""
