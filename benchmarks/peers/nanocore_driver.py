"""Our own engine behind compare.py's line protocol, run as offline.py runs it.

    python nanocore_driver.py --model FOLDER [flags of nanocore-engine]

Needs the folder of offline.py on the path. Must not be stopped between its turns: the engine ends
sessions that are silent for 30 seconds. It blocks on its sockets meanwhile.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from line_protocol import Requests, claim_stdout, describe_run, serve
from machine import describe_versions
from offline import engine_arguments, generate, latencies_ms
from workloads import BenchmarkRequest

from nanocore.client import LLM
from nanocore.engine_core.cli import parse_config


def main() -> None:
    """Start the engine and serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    arguments, engine_flags = parser.parse_known_args()
    answers = claim_stdout()
    config = parse_config(engine_flags)
    settings = asdict(config)
    for name in ("model", "listen", "step_trace"):
        del settings[name]
    with LLM(arguments.model, **engine_arguments(config)) as llm:

        def run(requests: Requests) -> dict[str, Any]:
            wall_s, outputs = generate(llm, [BenchmarkRequest(tuple(p), n) for p, n in requests])
            ttft_ms, tpot_ms = latencies_ms(outputs)
            return describe_run(
                wall_s,
                [ms / 1e3 for ms in ttft_ms],
                [ms / 1e3 for ms in tpot_ms],
                [output.outputs[0].token_ids for output in outputs],
            )

        card = llm.model_card
        settings |= {"dtype": card.dtype, "num_blocks": card.num_blocks}
        serve(answers, run, versions=describe_versions(), settings=settings, may_be_stopped=False)


if __name__ == "__main__":
    main()
