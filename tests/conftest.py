"""Fixtures that tests of several rooms use: tiny models, made once per session, and a folder.

Tests, and the engines and ranks they start, compute with one thread each: there are often more of
them than cores, and threads that spin for others which do not run make a second last a minute.

Triton's kernels run in its interpreter, which must be chosen before they are imported: it computes
with numpy, rightly in float32 only, and a program takes milliseconds. On a machine with a GPU,
`TRITON_INTERPRET=0 python -m pytest tests/gpu` runs what needs one.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

from tests import campaign, triton_interpreter
from tests.tiny_models import make_tiny_qwen3


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what imports and collection make lives on: collections would walk it in vain
    campaign.configure(config)
    if os.environ["TRITON_INTERPRET"] == "1":
        triton_interpreter.make_faster()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clients keep files that they fetch, and engines register, in folders of the tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    with tempfile.TemporaryDirectory(prefix="nc-run-", dir="/tmp") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        yield Path(directory)


@pytest.fixture(scope="module", autouse=True)
def _own_engines(_own_places: Path) -> Iterator[None]:
    """Tools find engines of this module only: some live as long as the session."""
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(dir=_own_places)
    yield
    os.environ["XDG_RUNTIME_DIR"] = str(_own_places)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings, fp32, in one file."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untied_sharded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a head of its own, fp32, in several shards with an index."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("untied"), tied=False, shards=3)


@pytest.fixture(scope="session")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in bfloat16."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("bf16"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def forked_launches() -> Iterator[None]:
    """Engines that clients launch in this process are forked."""
    from nanocore.client.connection import engine_process
    from tests.end_to_end import forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "subprocess", forked.FORKS)
        yield


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A private directory whose path is short enough for a Unix socket, unlike tmp_path's."""
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as directory:
        yield Path(directory)
