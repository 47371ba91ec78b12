"""Analysis of step traces: request timelines, summaries and explanations.

Reads the lines that `nanocore-engine --step-trace FILE` writes, and needs no engine and no model.
"""
