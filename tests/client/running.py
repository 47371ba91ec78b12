"""Running a coroutine as a test: it must end soon, because a wait without an end is a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
PATIENCE_S: Final = 30.0


def run(coroutine: Coroutine[Any, Any, Result], patience_s: float = PATIENCE_S) -> Result:
    """Run a coroutine in an event loop of its own.

    Raises:
        TimeoutError: it has not ended within patience_s.
    """

    async def bounded() -> Result:
        try:
            async with asyncio.timeout(patience_s):
                return await coroutine
        except BaseException:
            # The tasks that a failed test leaves behind have failed, too; that is not news.
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            raise

    return asyncio.run(bounded())
