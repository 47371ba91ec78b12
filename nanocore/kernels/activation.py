"""The activations that kernels know, by name: readable without torch."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu"]
"""gelu is its tanh approximation."""
