"""Rows with masks of all kinds, and the same rows with minus infinity for what these forbid.

The bits are packed by numpy, so that nothing here shares code with `TokenMask.is_allowed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Filters, Noise

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MaskedRows:
    """filled_RV: logits_RV with minus infinity for forbidden tokens."""

    logits_RV: Tensor
    mask: TokenMask
    filled_RV: Tensor

    @classmethod
    def draw(
        cls, seed: int, num_rows: int, width: int, first_token: int = 0, spoilt: float = 0.3
    ) -> MaskedRows:
        """spoilt: how likely a row has NaN or infinity at a place."""
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((num_rows, width), np.float32)
        logits *= rng.choice([0.01, 3.0])
        if rng.random() < 0.3:
            logits = logits.round()  # many are equal
        for row in np.flatnonzero(rng.random(num_rows) < spoilt):
            logits[row, rng.integers(width)] = rng.choice([np.nan, -np.nan, np.inf, -np.inf])
        vocab_size = first_token + width
        allowed = np.stack([_draw_allowed(rng, vocab_size) for _ in range(rng.integers(1, 5))])
        index = rng.integers(-1, len(allowed), num_rows)
        if rng.random() < 0.1:
            allowed, index = allowed[:0], np.full(num_rows, -1)
        is_forbidden = np.zeros((num_rows, width), bool)
        for row in np.flatnonzero(index >= 0):
            is_forbidden[row] = ~allowed[index[row], first_token:]
        filled = np.where(is_forbidden, np.float32(-np.inf), logits)
        mask = TokenMask(pack(allowed, rng), torch.from_numpy(index.astype(np.int32)))
        return cls(torch.from_numpy(logits), mask, torch.from_numpy(filled))

    def assert_same(self, ours: Result, theirs: Result) -> None:
        """Whether this is what the same kernel makes of the filled rows, to the bit.

        Of a row that has no token kernels may say NaN or infinity, but where one is NaN.
        """
        assert ours[1].tolist() == theirs[1].tolist()
        has_token_R = theirs[1] >= 0
        assert torch.equal(ours[0][has_token_R], theirs[0][has_token_R])
        assert not ours[0][~has_token_R].isfinite().any()
        assert ours[0][self.filled_RV.isnan().any(dim=1)].isnan().all()
        is_empty_R = (self.filled_RV == -torch.inf).all(dim=1)
        assert (ours[0][is_empty_R] == -torch.inf).all()
        assert (ours[1][is_empty_R] == -1).all()


def _draw_allowed(rng: np.random.Generator, vocab_size: int) -> NDArray[np.bool_]:
    match rng.integers(5):
        case 0:
            return np.full(vocab_size, rng.random() < 0.5)
        case 1:
            return np.arange(vocab_size) == rng.integers(vocab_size)
        case 2:  # words of nothing else beside others
            runs = rng.random(vocab_size // 40 + 1) < rng.choice([0.1, 0.5, 0.9])
            return np.repeat(runs, 40)[:vocab_size]
        case _:
            return rng.random(vocab_size) < rng.choice([0.02, 0.5, 0.98])


def pack(allowed_MV: NDArray[np.bool_], rng: np.random.Generator) -> Tensor:
    """Words of masks; what is beyond the vocabulary is drawn."""
    num_masks, vocab_size = allowed_MV.shape
    num_words = -(-vocab_size // 32)
    bits = rng.random((num_masks, num_words * 32)) < 0.5
    bits[:, :vocab_size] = allowed_MV
    packed = np.packbits(bits, axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy().reshape(num_masks, num_words))


def draw_noise(seed: int, num_rows: int, may_be_greedy: bool = True) -> Noise:
    rng = np.random.default_rng(seed)
    choices = [0.0, 0.7, 1.0, 20.0] if may_be_greedy else [0.7, 1.0, 20.0]
    return Noise(
        torch.from_numpy(rng.choice(choices, num_rows).astype(np.float32)),
        torch.from_numpy(rng.integers(-(2**60), 2**60, num_rows)),
        torch.from_numpy(rng.integers(0, 5000, num_rows)),
    )


def draw_filters(seed: int, num_rows: int, width: int) -> Filters:
    rng = np.random.default_rng(seed)
    top_k = np.where(rng.random(num_rows) < 0.4, 2**31 - 1, rng.integers(1, 60, num_rows))
    return Filters(
        torch.from_numpy(np.where(rng.random(num_rows) < 0.2, width, top_k).astype(np.int32)),
        torch.from_numpy(rng.choice([1.0, 1.0, 0.3, 0.9, 0.999], num_rows).astype(np.float32)),
        torch.from_numpy(rng.choice([0.0, 0.0, 0.01, 0.3], num_rows).astype(np.float32)),
    )
