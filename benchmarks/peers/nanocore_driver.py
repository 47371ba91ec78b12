"""Our own engine behind the line protocol, through its SDK.

    python nanocore_driver.py --model FOLDER [--temperature 0.6] [flags of nanocore-engine]

Must not be stopped between its turns: the engine ends sessions that are silent for 30 seconds. It
blocks on its sockets meanwhile.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from typing import Any

import torch
from line_protocol import Requests, Sampling, claim_stdout, describe_run, serve

import nanocore
from nanocore.client import LLM
from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.sampling import SamplingParams


def main() -> None:
    """Start the engine and serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments, engine_flags = parser.parse_known_args()
    answers = claim_stdout()
    config, default = parse_config(engine_flags), EngineConfig()
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    changed = {name: value for name, value in settings.items() if value != getattr(default, name)}
    with LLM(arguments.model, **changed) as llm:
        for name in ("model", "listen", "step_trace"):
            del settings[name]
        card = llm.model_card
        settings |= {"dtype": card.dtype, "num_blocks": card.num_blocks}
        serve(
            answers,
            lambda *run: _run(llm, *run, temperature=arguments.temperature),
            versions={"nanocore": nanocore.__version__, "torch": torch.__version__},
            settings=settings,
            may_be_stopped=False,
        )


def _run(llm: LLM, requests: Requests, sampling: Sampling, temperature: float) -> dict[str, Any]:
    """Without cached prefixes."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine did not reset its prefix cache: is a request running?")
    params = [
        SamplingParams(
            **({"temperature": temperature} | sampling),
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            seed=i,
        )
        for i, (_, count) in enumerate(requests)
    ]
    start_s = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    ttft_s = [output.metrics.time_to_first_token_s or wall_s for output in outputs]
    tpot_s = [
        (output.metrics.e2e_latency_s - first_s) / max(1, output.metrics.num_output_tokens - 1)
        for output, first_s in zip(outputs, ttft_s, strict=True)
    ]
    return describe_run(wall_s, ttft_s, tpot_s, [o.outputs[0].token_ids for o in outputs])


if __name__ == "__main__":
    main()
