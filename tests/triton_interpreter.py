"""Triton's interpreter without what it does again and again for nothing, half of its time."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_find_dtype = interpreter._get_np_dtype


def make_faster() -> None:
    """Compute the same in this process from now on."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = lambda dtype: _dtype_by_name(dtype.scalar)
    # What it finds of overflows is not said without debugging.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Patch what is not patched already: each function that a kernel calls asks for it."""
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _names_of_builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


_dtypes: dict[str, np.dtype] = {}


def _dtype_by_name(scalar: tl.dtype) -> np.dtype:
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = _find_dtype(scalar)
    return _dtypes[scalar.name]
