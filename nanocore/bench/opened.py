"""A target that is ready to be measured, with what a run and its result must know of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nanocore.bench.datasets import PromptSource
from nanocore.bench.load import Target
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, EngineDeadError, InvalidRequestError

RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Opened:
    """model_id, tokenizer_id: as results name them."""

    target: Target
    source: PromptSource
    model_id: str
    tokenizer_id: str | None


@contextmanager
def tokenizer_at(path: str) -> Iterator[Tokenizer]:
    """The tokenizer of a folder, or of a tokenizer.json.

    Raises:
        ConfigError: there is none.
    """
    try:
        if Path(path).is_file():
            tokenizer = Tokenizer({"tokenizer.json": Path(path).read_bytes()}, path)
        else:
            tokenizer = Tokenizer.from_folder(Path(path))
    except (InvalidRequestError, OSError) as error:
        raise ConfigError(f"--tokenizer {path}: {error}") from None
    try:
        yield tokenizer
    finally:
        tokenizer.close()


async def until_ready(attempt: Callable[[], Awaitable[str]], patience_s: float) -> None:
    """Try this until it returns no problem; at least once.

    Raises:
        EngineDeadError: the last problem, when patience has ended.
    """
    deadline_s = time.monotonic() + patience_s
    while problem := await attempt():
        if time.monotonic() + RETRY_S > deadline_s:
            waited = f" (not ready after {patience_s:g} s)" if patience_s else ""
            raise EngineDeadError(problem + waited)
        await asyncio.sleep(RETRY_S)
