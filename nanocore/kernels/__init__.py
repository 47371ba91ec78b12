"""The operations a model is made of: one interface, several backends, tested against each other.

`interface` says what every backend implements, in four parts: `linear`, `attention`, `sampling` and
`step`. A backend is put together from a class for each; none inherits from another backend. `torch`
is the reference that the others are compared with. `select` chooses by what the machine can do, and
the engine's log names the choice.
"""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu"]
"""Activations that kernels know; gelu is its tanh approximation."""
Score = Literal["softmax", "sigmoid"]
"""What routers make of an expert's logit."""
