"""Running a coroutine as a test: it must end soon, because a wait without an end is a failure."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

import uvloop

Result = TypeVar("Result")
Params = ParamSpec("Params")
PATIENCE_S: Final = 30.0


def run(
    coroutine: Coroutine[Any, Any, Result],
    patience_s: float = PATIENCE_S,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Result:
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

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(bounded())


def in_uvloop(test: Callable[Params, Coroutine[Any, Any, None]]) -> Callable[Params, None]:
    """Make a test of a coroutine function in a uvloop, which servers have."""

    @functools.wraps(test)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> None:
        run(test(*args, **kwargs), 2 * PATIENCE_S, uvloop.new_event_loop)

    return wrapper
