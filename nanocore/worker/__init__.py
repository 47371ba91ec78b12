"""What computes: models and their weights, the persistent batch, sampling, and what runs them.

`worker.Worker` is one rank. It lives in the engine process if it is alone, else in a process of its
own (`__main__`); the step loop sees an `executors.executor.Executor` either way.
"""
