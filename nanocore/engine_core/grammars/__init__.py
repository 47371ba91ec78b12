"""Structured outputs in the engine: grammars are compiled here, and masks of tokens are filled."""
