"""Which of our flags somebody means who writes one that there is not.

Whoever comes from another engine writes its names, and the nearest spelling then means something
else: `--ctx-size` is no `--block-size`. So other engines' names are looked up first, and only what
is none of them is taken for a misspelling. docs/coming-from.md has the same names; a test compares.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Final

OTHER_NAMES: Final = {
    # vLLM
    "--api-server-count": "--http-workers",
    "--disable-uvicorn-access-log": "--disable-access-log",
    "--enable-log-requests": "--enable-access-log",
    "--disable-log-requests": "--disable-access-log",
    "--kv-events-config": "--kv-events-endpoint",
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--random-seed": "--seed",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-total-tokens": "--num-gpu-blocks-override",
    "--page-size": "--block-size",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--prefill-max-requests": "--max-num-partial-prefills",
    "--schedule-policy": "--scheduling-policy",
    "--enable-priority-scheduling": "--scheduling-policy",
    "--schedule-conservativeness": "--watermark",
    "--tp-size": "--tp",
    "--pp-size": "--pp",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--enable-deterministic-inference": "--batch-invariant",
    "--json-model-override-args": "--hf-overrides",
    "--log-requests": "--enable-access-log",
    # llama-server
    "-m": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "-ngl": "--device",
    "--gpu-layers": "--device",
    "--n-gpu-layers": "--device",
    "-fa": "--attention-backend",
    "--flash-attn": "--attention-backend",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "-sm": "--tp",
    "--split-mode": "--tp",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--cache-prompt": "--enable-prefix-caching",
    "--no-cache-prompt": "--no-enable-prefix-caching",
    "--cors-origins": "--allowed-origins",
    "--log-jsonl": "--log-format",
    "--timeout": "--send-timeout",
    "--threads-http": "--http-workers",
    "--sse-ping-interval": "--comment-interval",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--reasoning-format": "--reasoning-parser",
    "-s": "--seed",
}
"""Of ours by theirs; where it takes another value, too, docs/coming-from.md says so."""


def near_flag(argument: str, known: Collection[str], nearness: float) -> str | None:
    """The one of these flags that an argument may mean; None: it means none of them.

    nearness: of spellings, from 0 to 1, what makes one a misspelling of the other.
    """
    name = argument.partition("=")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    if name in known:
        return name
    if name in OTHER_NAMES:
        return OTHER_NAMES[name] if OTHER_NAMES[name] in known else None
    if not name.startswith("--"):
        return None
    longer = [flag for flag in known if flag.startswith(f"{name}-")]
    near = longer if len(longer) == 1 else get_close_matches(name, known, n=1, cutoff=nearness)
    return near[0] if near else None
