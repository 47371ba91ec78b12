"""How a subcommand's process says that it lost the device, and is told to go on. No imports."""

from __future__ import annotations

from typing import Final

RESTART: Final = 75
"""Exit code: the CUDA context is broken, start this subcommand again for the rest."""
CONTINUE_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_CONTINUES"
"""Names the subcommand whose report is to be continued."""
