"""Proposers of speculative decoding that run where the model does, one a file."""
