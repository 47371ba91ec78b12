"""vLLM behind the line protocol, on a CPU or a GPU: V1, engine core in a process of its own.

    path/to/python-with-vllm vllm_driver.py --model FOLDER --threads 2 --kv-cache-gib 2
    path/to/python-with-vllm vllm_driver.py --model FOLDER --device cuda --random-weights --inductor

On a CPU all cores compute: vLLM's default keeps one back for its own scheduler. Intel's OpenMP and
tcmalloc are preloaded, as vLLM's documentation advises; what is not found is said in `settings`.

On a GPU attention is FlashAttention 3. With `--inductor` vLLM compiles and records graphs as it
does by default, which takes up to a minute. Without, torch.compile is off, decode steps are CUDA
graphs, and norms, activations and rotary embeddings are vLLM's own kernels.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from line_protocol import (
    Requests,
    Sampling,
    TokenClock,
    claim_stdout,
    describe_run,
    driver_parser,
    serve,
)

_STARTED = "NANOCORE_COMPARE_PRELOADED"


def main() -> None:
    """Start again with what must be in the environment of a new process, then serve."""
    parser = driver_parser()
    parser.add_argument("--inductor", action="store_true", help="compile, on a GPU")
    arguments = parser.parse_args()
    if _STARTED not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], _environment(arguments))
    answers = claim_stdout()
    _serve(answers, arguments)


def _serve(answers: Any, arguments: argparse.Namespace) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    on_gpu = arguments.device == "cuda"
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=arguments.model,
            skip_tokenizer_init=True,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            enable_prefix_caching=not on_gpu,
            load_format="dummy" if arguments.random_weights else "auto",
            disable_log_stats=True,
            **(_gpu_options(arguments) if on_gpu else {}),
        ),
        enable_multiprocessing=True,
    )
    settings = _gpu_settings(engine) if on_gpu else _cpu_settings()
    serve(
        answers,
        lambda requests, sampling: _run(
            engine, requests, {"temperature": arguments.temperature} | sampling, on_gpu
        ),
        versions={"vllm": vllm.__version__},
        settings=settings | {"dtype": arguments.dtype},
        may_be_stopped=not on_gpu,
    )


def _gpu_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine that only a GPU needs."""
    plain = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {
        "gpu_memory_utilization": arguments.memory_share,
        "compilation_config": {} if arguments.inductor else plain,
        "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
    }


def _gpu_settings(engine: Any) -> dict[str, Any]:
    config = engine.vllm_config
    return {
        "compilation": config.compilation_config.mode.name,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
    }


def _cpu_settings() -> dict[str, Any]:
    return {
        "preloaded": [Path(p).name for p in os.environ["LD_PRELOAD"].split(":") if p],
        "omp_threads_bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
    }


def _run(engine: Any, requests: Requests, sampling: Sampling, only_final: bool) -> dict[str, Any]:
    """Add all requests, then step until they are done.

    only_final: each request is reported once, when it is done, so no tokens are timed.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY if only_final else RequestOutputKind.CUMULATIVE
    token_ids: list[list[int]] = [[] for _ in requests]
    start_s = time.perf_counter()
    clock = TokenClock(start_s, len(requests))
    for index, (prompt, num_output_tokens) in enumerate(requests):
        params = SamplingParams(
            **sampling, ignore_eos=True, max_tokens=num_output_tokens, detokenize=False,
            output_kind=kind,
        )  # fmt: skip
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            clock.tick(index, time.perf_counter())
            if output.finished:
                token_ids[index] = list(output.outputs[0].token_ids)
    wall_s = time.perf_counter() - start_s
    if only_final:
        return describe_run(wall_s, [], [], token_ids)
    return clock.describe_run(wall_s, token_ids)


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What vLLM must be started with."""
    common = {
        _STARTED: "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if arguments.device == "cuda":
        # Process groups of one process: they need no network but the loopback device.
        network = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        absent = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        # What it compiles is apart from our kernels, which a day keeps.
        folder = Path(tempfile.gettempdir()) / f"nanocore-vllm-{os.getuid()}"
        names = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor",
                 "TRITON_CACHE_DIR": "triton"}  # fmt: skip
        caches = {name: str(folder / part) for name, part in names.items()}
        return os.environ | common | network | absent | caches
    intel_openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    found = [str(intel_openmp)] if intel_openmp.exists() else []
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    found += [tcmalloc] if tcmalloc else []
    processor = {
        "LD_PRELOAD": ":".join(found),
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_cache_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}",
    }
    return os.environ | common | processor


if __name__ == "__main__":
    main()
