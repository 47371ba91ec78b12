"""Tensors on a CUDA device in bfloat16, and how close they have to be to a reference."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

DEVICE: Final = torch.device("cuda", 0)
DTYPE: Final = torch.bfloat16
MAX_ERROR: Final = 0.02
"""Of the norm: operands and results are rounded to 8 bits, and so is what is between."""


def close(actual: Tensor, expected: Tensor, max_error: float = MAX_ERROR) -> None:
    """Assert that the norm of the difference is small beside that of the reference."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < max_error, float(error)


def there(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A tensor, or all in a Struct or a dataclass, on the device; floats in this dtype."""
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype if dtype and value.dtype == torch.float32 else None)
    if isinstance(value, msgspec.Struct):
        fields_there = {n: there(getattr(value, n), dtype) for n in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields_there)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: there(getattr(value, f.name), dtype) for f in fields(value) if f.init}
        )
    return value
