"""`nanocore batch`: checks packages, and runs the batch."""

from __future__ import annotations

import logging

from nanocore.cli.batch.flags import parse
from nanocore.cli.command import require, require_engine
from nanocore.system.logs import start_log


def run(arguments: list[str]) -> int:
    options = parse(arguments)
    require(("prometheus_client",), "a batch needs", "pip install '.[server]'")
    if options.url is None:
        require_engine(options.engine)
    else:
        require(("aiohttp",), "--url needs", "pip install '.[chat]'")
    start_log("batch")
    for notice in options.engine.notices:
        logging.info("%s", notice)
    from nanocore.cli.batch.session import answer_batch

    return answer_batch(options)
