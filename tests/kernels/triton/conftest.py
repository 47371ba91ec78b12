"""What tests of Triton's kernels share."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime import interpreter


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's matrix products sum k in one order, as a GPU's tensor cores do.

    It calls numpy, whose BLAS on some processors sums a row in an order that depends on where in
    the matrix the row is: bits of a row could then not be compared.
    """

    def matmul(
        a: NDArray[np.floating], b: NDArray[np.floating], dtype: np.dtype[np.floating]
    ) -> NDArray[np.floating]:
        a, b = a.astype(dtype), b.astype(dtype)
        out = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            out += a[..., :, k, None] * b[..., None, k, :]
        return out

    class Numpy:
        """numpy, but for its matrix product."""

        def __getattr__(self, name: str) -> object:
            return matmul if name == "matmul" else getattr(np, name)

    monkeypatch.setattr(interpreter, "np", Numpy())
