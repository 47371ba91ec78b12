"""The client of the engine that a command line has chosen: one that runs, or one's own."""

from __future__ import annotations

from collections.abc import Callable

from nanocore.cli.engine_choice import EngineChoice
from nanocore.client import AsyncEngineClient
from nanocore.client.connection.engine_supervisor import EngineSupervisor


def engine_client(
    choice: EngineChoice, new_supervisor: Callable[[], EngineSupervisor] | None = None
) -> AsyncEngineClient:
    """Not entered yet. Requests go on with the next engine, if theirs dies.

    new_supervisor: of an engine that is launched, in place of one as the choice says.
    """
    if choice.endpoints:
        return AsyncEngineClient.connect(
            choice.endpoints,
            curve_dir=choice.curve_dir,
            tokenizer=choice.tokenizer,
            timeout_s=choice.start_timeout_s,
        )
    return AsyncEngineClient(
        endpoints=(),
        tokenizer=choice.tokenizer,
        timeout_s=choice.start_timeout_s,
        resume_timeout_s=choice.start_timeout_s,
        new_supervisor=new_supervisor
        or (lambda: EngineSupervisor(choice.flags, choice.max_restarts)),
    )
