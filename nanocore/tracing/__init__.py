"""What a step trace says: lives of requests, a summary, a picture for Perfetto, explanations.

Reads the lines that `nanocore-engine --step-trace FILE` writes, and needs no engine and no model.
"""
