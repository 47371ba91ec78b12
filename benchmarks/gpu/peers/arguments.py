"""What every driver is told, and how it answers. Standard library only: peers have their own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

MAX_MODEL_LEN: Final = 4096
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 16384


def driver_parser() -> argparse.ArgumentParser:
    """The flags that all drivers have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-share", type=float, default=0.9)
    parser.add_argument("--carried", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--attention")
    parser.add_argument("--enforce-eager", action="store_true", help="ours: without graphs")
    return parser
