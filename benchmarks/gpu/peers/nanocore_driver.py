"""Our engine through its SDK, with dummy weights, behind the line protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import common_settings
from benchmarks.gpu.offline import generate
from benchmarks.gpu.peers.arguments import driver_parser
from benchmarks.gpu.session import PACKAGES, Session
from benchmarks.gpu.workload import Workload
from benchmarks.machine import describe_versions
from benchmarks.peers.line_protocol import Requests, claim_stdout, describe_run, serve
from nanocore.client import LLM


def main() -> None:
    """Start the engine and serve."""
    arguments = driver_parser().parse_args()
    answers = claim_stdout()
    session = Session(out=Path(), device=torch.device(arguments.device), small=arguments.small)
    settings = common_settings(session) | {"enforce_eager": arguments.enforce_eager}
    if session.on_gpu:
        settings["gpu_memory_utilization"] = arguments.memory_share
    with LLM(arguments.model, **settings) as llm:

        def run(requests: Requests) -> dict[str, Any]:
            workload = Workload([p for p, _ in requests], [n for _, n in requests])
            wall_s, tokens = generate(llm, workload)
            return describe_run(wall_s, [], [], tokens)

        serve(
            answers,
            run,
            versions=describe_versions(PACKAGES),
            settings=settings,
            may_be_stopped=False,
        )


if __name__ == "__main__":
    main()
