"""What computes: models, weights, the persistent batch, sampling, and the executor that owns them.

At tensor parallel size 1 all of it lives in the engine process, behind `executor.Executor`.
"""
