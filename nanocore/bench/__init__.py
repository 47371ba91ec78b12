"""Measures engines and servers: `nanocore bench serve | throughput | latency | startup`.

Flags, JSON keys and the meaning of each metric are those of `vllm bench`, so that figures of both
can stand side by side. What is computed is apart from what is sent: datasets, arrival times and
statistics are functions of their arguments and a seed. Needs the extra `bench`; imports no torch.
"""
