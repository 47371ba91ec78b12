"""Prints a digest of products of bfloat16: amx_fingerprint.py LIBRARY."""

from __future__ import annotations

import sys

import torch
import xxhash

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import Library
from tests.kernels.cpu_case import PagedCase


def main() -> None:
    torch.manual_seed(0)
    kernels = CpuKernels(Library(sys.argv[1], "given"))
    digest = xxhash.xxh3_128()
    for in_features in (33, 512):
        packed = kernels.pack_linear(torch.randn(70, in_features).bfloat16())
        for num_rows in (1, 13, 40):
            x_TI = torch.randn(num_rows, in_features).bfloat16()
            digest.update(kernels.logits(x_TI, packed).numpy().tobytes())
    print("linear", digest.hexdigest())
    case = PagedCase([[150, 1], [40, 3], [9, 1]], head_dim=64, dtype=torch.bfloat16)
    for _, out_THD in case.run(kernels):
        digest.update(out_THD.float().numpy().tobytes())
    print("attention", digest.hexdigest())


if __name__ == "__main__":
    main()
