"""Text of a model to reasoning, text and tool calls, as it arrives."""
