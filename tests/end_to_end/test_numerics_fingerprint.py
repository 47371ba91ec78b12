"""The fingerprint that clients are told, of engines with one rank and with several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.forked import ask
from tests.kernels.cpu_case import runnable_libraries
from tests.tiny_models import make_tiny_qwen3

pytestmark = pytest.mark.skipif(
    not runnable_libraries(), reason="nanocore was installed without a C++ compiler"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are whole vectors, so that the native kernels compute all of it."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16)


def fingerprint(model: Path, **engine_args: int | str) -> str | None:
    return ask(model, lambda card: [1, 2, 3], **engine_args)[0].numerics_fingerprint


def test_engines_of_other_sizes_have_the_same_and_of_more_ranks_another(model: Path) -> None:
    first = fingerprint(model)
    assert first is not None
    assert fingerprint(model, max_num_seqs=3, max_num_batched_tokens=7, block_size=32) == first
    ranks = [fingerprint(model, tensor_parallel_size=2) for _ in range(2)]
    assert ranks[0] == ranks[1] not in (None, first)


def test_an_engine_that_computes_with_torch_tells_none(model: Path) -> None:
    assert fingerprint(model, attention_backend="torch") is None
