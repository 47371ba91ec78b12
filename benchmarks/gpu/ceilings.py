"""What the machine can do at its best: copies, reads, products of matrices, launches, transfers.

Everything else is a share of these. Operands are random: products of zeros run faster on a GPU than
products of anything else, for they take less power.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.session import Results, Session
from benchmarks.gpu.shapes import models
from benchmarks.gpu.timing import num_sets, synchronize, time_calls, time_host
from benchmarks.machine import spread


def measure(session: Session) -> None:
    """Measure all ceilings."""
    results = Results(session, "ceilings")
    mib = 2**20
    copies = {"copy": 4096 * mib, "copy/256_mib": 256 * mib, "read": 4096 * mib}
    for name, num_bytes in copies.items():
        if session.wants(name):
            size = 4 * mib if session.small else num_bytes
            results.measure(name, _bandwidth, name, size, session.device)
    for name, (m, n, k) in _gemm_sizes(session).items():
        if session.wants(name):
            results.measure(name, _gemm, m, n, k, session.device)
    if session.wants("launch"):
        results.measure("launch", _launch, session)
    if session.wants("transfer"):
        results.measure("transfer/64_kib", _transfer, session)
    results.finish()


def _gemm_sizes(session: Session) -> dict[str, tuple[int, int, int]]:
    """(rows, out features, in features) by name: one that fills the chip, and the models'."""
    large = 128 if session.small else 8192
    sizes = {"gemm/8192": (large, large, large)}
    for name, model in models(session).items():
        shape = model.shape
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        layers = {
            "qkv": (q_size + 2 * kv_size, shape.hidden_size),
            "o": (shape.hidden_size, q_size),
            "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
            "down": (shape.hidden_size, shape.intermediate_size),
            "head": (shape.vocab_size, shape.hidden_size),
        }
        for layer, (out_features, in_features) in layers.items():
            for rows in (4,) if session.small else (1, 32, 256, 4096):
                if layer != "head" or rows <= 256:
                    sizes[f"gemm/{name}/{layer}/{rows}"] = (rows, out_features, in_features)
    return sizes


def _bandwidth(name: str, num_bytes: int, device: torch.device) -> dict[str, Any]:
    """GB/s; of a copy, bytes read and bytes written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    if name == "read":
        words, moved = source.view(torch.int64), num_bytes
        figures = time_calls([lambda: torch.amax(words)], device)
    else:
        target, moved = torch.empty_like(source), 2 * num_bytes
        figures = time_calls([lambda: target.copy_(source)], device)
    values = [round(moved / us / 1e3, 2) for us in figures["us"]["values"]]
    return {"gb_per_s": spread(values), "bytes": num_bytes, "method": figures["method"]}


def _gemm(rows: int, out_features: int, in_features: int, device: torch.device) -> dict[str, Any]:
    """A linear layer of bfloat16, its weight not in the cache."""
    num_bytes = 2 * (rows * in_features + out_features * in_features + rows * out_features)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    calls = []
    for _ in range(num_sets(num_bytes, device)):
        x, weight = random(rows, in_features), random(out_features, in_features)
        calls.append(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
    figures = time_calls(calls, device)
    flops = 2 * rows * out_features * in_features
    us = figures["us"]
    return {
        "us": us,
        "tflop_per_s": spread([round(flops / t / 1e6, 3) for t in us["values"]]),
        "gb_per_s": spread([round(num_bytes / t / 1e3, 2) for t in us["values"]]),
        "method": figures["method"],
    }


def _launch(session: Session) -> dict[str, Any]:
    """Microseconds of an empty Triton kernel: on the host, and from node to node of a graph."""
    from benchmarks.gpu.empty_kernel import launch_empty

    x = torch.zeros(1, device=session.device)
    launch_empty(x)
    num_calls = 3 if session.small else 500
    figures: dict[str, Any] = {
        "host_us": time_host(lambda: launch_empty(x), num_calls, session.device),
        "torch_host_us": time_host(lambda: x.zero_(), num_calls, session.device),
    }
    if session.on_gpu:
        figures["in_graph_us"] = time_calls([lambda: launch_empty(x)], session.device)["us"]
    return figures


def _transfer(session: Session) -> dict[str, Any]:
    """Microseconds from the host's order to the data's arrival, of a step's packed inputs."""
    host = torch.randint(0, 100, (16384,), dtype=torch.int32)
    host = host.pin_memory() if session.on_gpu else host
    target = torch.empty_like(host, device=session.device)

    def there() -> None:
        target.copy_(host, non_blocking=True)
        synchronize(session.device)

    def and_back() -> None:
        target.copy_(host, non_blocking=True)
        target[:256].cpu()

    num_calls = 3 if session.small else 200
    return {
        "to_device_us": time_host(there, num_calls, session.device),
        "and_1_kib_back_us": time_host(and_back, num_calls, session.device),
    }
