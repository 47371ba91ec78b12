"""Parsers that split a model's text into reasoning, text and tool calls as it arrives."""
