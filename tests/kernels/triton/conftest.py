"""Triton's interpreter stands in for the GPU here; it must be chosen before kernels are imported.

It computes with numpy, rightly in float32 only, and a program takes milliseconds: tiny shapes.
Races and the number of warps do not exist in it; `test_compilation` looks at the compiled code.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
