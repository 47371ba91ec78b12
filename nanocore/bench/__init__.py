"""`nanocore bench serve | throughput | latency`: benchmarks of engines and servers.

Flags, JSON keys and metrics are those of `vllm bench`, so that results are comparable. Datasets,
arrival times and statistics are pure functions. Needs the extra `bench`; imports no torch.
"""
