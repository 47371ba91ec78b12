"""vLLM behind the line protocol, on a CPU: V1, engine core in a process of its own.

    path/to/python-with-vllm vllm_driver.py --model FOLDER --threads 2 --kv-cache-gib 2

All cores compute: vLLM's default keeps one back for its own scheduler. Intel's OpenMP and tcmalloc
are preloaded, as vLLM's documentation advises; what is not found is said in `settings`.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from line_protocol import Requests, Sampling, TokenClock, claim_stdout, driver_parser, serve

_STARTED = "NANOCORE_COMPARE_PRELOADED"


def main() -> None:
    """Start again with what must be in the environment of a new process, then serve."""
    arguments = driver_parser().parse_args()
    if _STARTED not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], _environment(arguments))
    answers = claim_stdout()
    _serve(answers, arguments)


def _serve(answers: Any, arguments: argparse.Namespace) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=arguments.model,
            skip_tokenizer_init=True,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ),
        enable_multiprocessing=True,
    )
    settings = {
        "dtype": arguments.dtype,
        "preloaded": [Path(p).name for p in os.environ["LD_PRELOAD"].split(":") if p],
        "omp_threads_bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
    }
    serve(
        answers,
        lambda requests, sampling: _run(engine, requests, sampling),
        versions={"vllm": vllm.__version__},
        settings=settings,
    )


def _run(engine: Any, requests: Requests, sampling: Sampling) -> dict[str, Any]:
    """Add all requests, then step until they are done."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    token_ids: list[list[int]] = [[] for _ in requests]
    start_s = time.perf_counter()
    clock = TokenClock(start_s, len(requests))
    for index, (prompt, num_output_tokens) in enumerate(requests):
        params = SamplingParams(
            **({"temperature": 0.0} | sampling), ignore_eos=True, max_tokens=num_output_tokens,
            detokenize=False, output_kind=RequestOutputKind.CUMULATIVE,
        )  # fmt: skip
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            clock.tick(index, time.perf_counter())
            if output.finished:
                token_ids[index] = list(output.outputs[0].token_ids)
    return clock.describe_run(time.perf_counter() - start_s, token_ids)


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What vLLM must be started with."""
    intel_openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    found = [str(intel_openmp)] if intel_openmp.exists() else []
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    found += [tcmalloc] if tcmalloc else []
    return os.environ | {
        _STARTED: "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(found),
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_cache_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}",
    }


if __name__ == "__main__":
    main()
