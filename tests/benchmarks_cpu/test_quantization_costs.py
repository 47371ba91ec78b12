"""What the benchmarks of quantized weights compute: bytes, divergences, and what they write."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library

needs_kernels = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def kernels(*, keeps_activations: bool = False) -> CpuKernels:
    library = find_library()
    assert library is not None
    return CpuKernels(library, keeps_activations=keeps_activations)


@needs_kernels
@pytest.mark.parametrize(("quantization", "bits"), [(None, 16), ("int8", 8.5), ("int4", 4.75)])
def test_weights_to_read_are_as_large_as_asked(quantization: str | None, bits: float) -> None:
    weight_reading = importlib.import_module("weight_reading")
    weights = weight_reading._weights(kernels(), (64, 128), 40_000, quantization)
    measured = weight_reading.measure(kernels(), weights, 2)
    of_each = 64 * 128 * bits / 8
    assert measured["bytes"] == pytest.approx(len(weights) * of_each, rel=0.05)
    assert measured["bytes"] >= 40_000 > measured["bytes"] - 1.1 * of_each
    assert len(measured["share"]["values"]) == 2
    assert weights[0].data.data_ptr() != weights[-1].data.data_ptr()


def test_divergence_is_the_mean_over_tokens() -> None:
    module = importlib.import_module("model_logprobs")
    even, uneven = (torch.tensor([[[p, 1 - p]]]).log() for p in (0.5, 0.75))
    assert module.divergence(even, even) == 0
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    both, other = torch.cat((even, even)), torch.cat((even, uneven))
    assert module.divergence(both, other) == pytest.approx(expected / 2, rel=1e-6)
    assert module.top1_agreement(uneven.expand(2, 1, 2), torch.cat((uneven, -uneven))) == 0.5


def test_logits_that_llama_cpp_saved_are_read_for_the_same_tokens_only(tmp_path: Path) -> None:
    module = importlib.import_module("model_logprobs")
    chunks_NC = torch.arange(8).view(2, 4)
    rows = np.zeros((2, 8), "<u2")  # one prediction for each chunk, of three tokens, padded to four
    rows[:, :4] = np.tile(np.array([0.5, -3.0], "<f4"), (2, 1)).view("<u2")
    rows[:, 4:7] = [0, 2, 4]
    path = tmp_path / "logits"
    head = b"_logits_" + np.array([4, 3, 2], "<i4").tobytes()
    path.write_bytes(head + np.arange(8, dtype="<i4").tobytes() + rows.tobytes())
    found = module.read_peer_logprobs(path, chunks_NC)
    assert found.tolist() == [[[-3.0, -2.0, -1.0]]] * 2
    with pytest.raises(ValueError, match="the tokens are others than ours"):
        module.read_peer_logprobs(path, chunks_NC + 1)
    with pytest.raises(ValueError, match="not 1 chunks of 8 tokens"):
        module.read_peer_logprobs(path, chunks_NC.view(1, 8))


def test_moved_weights_compute_what_they_did() -> None:
    module = importlib.import_module("quality_models")
    random = np.random.default_rng(1)
    shapes = {"attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8),
              "attn_v": (4, 8), "attn_output": (8, 8), "ffn_gate": (12, 8), "ffn_up": (12, 8),
              "ffn_down": (8, 12)}  # fmt: skip
    plain = {f"blk.0.{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
    moved = {name: values.copy() for name, values in plain.items()}
    module.move_off_levels(moved, 2)
    assert all(not np.allclose(plain[name], moved[name]) for name in plain)

    def products(of: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        at = {name: of[f"blk.0.{name}.weight"] for name in shapes}
        queries, keys = (at[name] * at["attn_norm"] for name in ("attn_q", "attn_k"))
        values = np.tile(at["attn_v"] * at["attn_norm"], (2, 1))
        up = at["ffn_down"] @ (at["ffn_up"] * at["ffn_norm"])
        parts = queries, keys, at["attn_output"] @ values, at["ffn_gate"] * at["ffn_norm"], up
        return np.concatenate(parts)

    np.testing.assert_allclose(products(plain), products(moved), rtol=1e-6)


def test_a_table_is_written_between_its_markers(tmp_path: Path) -> None:
    module = importlib.import_module("quality")
    document = tmp_path / "models.md"
    document.write_text("before\n<!-- quality: a -->\nold\n<!-- /quality -->\nafter\n")
    module.write_table(document, "a", "| new |")
    expected = "before\n<!-- quality: a -->\n| new |\n<!-- /quality -->\nafter\n"
    assert document.read_text() == expected
    with pytest.raises(ValueError, match="has no lines"):
        module.write_table(document, "b", "| new |")
