"""Fixtures of the client's tests."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.client.tokenizer import Tokenizer
from tests.client.running import run
from tests.tiny_models import write_byte_tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each in an event loop of its own, and with a time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the byte tokenizer's files, not to be written to."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the byte tokenizer's files, to be changed by the test."""
    write_byte_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def endpoint(short_path: Path) -> str:
    """An ipc endpoint that nobody serves."""
    return f"ipc://{short_path}/engine.sock"


@pytest.fixture
def joining(
    endpoint: str, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Let LLM join whatever serves the endpoint, and check that it leaves no thread behind."""

    def launch(model: str | None = None, **_: Any) -> AsyncEngineClient:
        return AsyncEngineClient.connect(
            endpoint, tokenizer=tokenizer_folder, timeout_s=0.05 if model == "nobody" else 5.0
        )

    monkeypatch.setattr(AsyncEngineClient, "launch", launch)
    yield endpoint
    assert "nanocore-llm" not in {thread.name for thread in threading.enumerate()}
