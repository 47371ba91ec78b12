"""Prints a digest of grouped weights' products: grouped_fingerprint.py INSTRUCTION_SET KEEPS."""

from __future__ import annotations

import sys

import torch
import xxhash

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from tests.kernels.cpu_case import runnable_libraries
from tests.kernels.grouped_case import FORMS


def main() -> None:
    torch.manual_seed(0)
    library = runnable_libraries()[sys.argv[1]]
    kernels = CpuKernels(library, keeps_activations=sys.argv[2] == "1")
    digest = xxhash.xxh3_128()
    for form in FORMS.values():
        packed = kernels.pack_linear(form(70, 600))
        for num_rows in (1, 13):
            x_TI = torch.randn(num_rows, 600) * 3
            for dtype in (torch.float32, torch.bfloat16):
                digest.update(kernels.logits(x_TI.to(dtype), packed).numpy().tobytes())
    for quantization in ("int4", "int8"):
        packed = kernels.pack_linear(torch.randn(70, 600), quantization)
        digest.update(kernels.logits(torch.randn(13, 600), packed).numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
