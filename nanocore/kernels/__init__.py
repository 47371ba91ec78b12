"""The operations a model is made of: one interface, several backends, tested against each other.

`interface` says what every backend implements; `select` chooses by what the machine can do, and the
engine's log names the choice. `torch` is the reference that the others are compared with.
"""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu"]
"""Activations that kernels know; gelu is its tanh approximation."""
