"""Flags of vLLM, SGLang and llama.cpp: which of ours they are, and which need nothing here."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
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
    "--chat-template-file": "--chat-template",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--reasoning-format": "--reasoning-parser",
    "-s": "--seed",
}
"""Our flag for each name in another engine; docs/coming-from.md lists the same."""
_OTHER_VALUES: Final = {
    "--kv-events-config", "--max-total-tokens", "--schedule-policy", "--enable-priority-scheduling",
    "--schedule-conservativeness", "-ngl", "--gpu-layers", "--n-gpu-layers", "-fa", "--flash-attn",
    "-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "-sm", "--split-mode", "--log-jsonl",
    "--reasoning-format", "--chat-template-kwargs", "--timeout", "--cors-origins",
}  # fmt: skip
"""Names of `OTHER_NAMES` whose values are not those of our flag: they are refused."""

IGNORED: Final = {
    # vLLM
    "--trust-remote-code": (0, "code of a model is never run"),
    "--enable-auto-tool-choice": (0, "tools need no flag"),
    "--enable-chunked-prefill": (0, "it is always on"),
    "--enable-tokenizer-info-endpoint": (0, "it is always there"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-request-id-headers": (0, "they are always sent"),
    # SGLang
    "--enable-metrics": (0, "they are always there"),
    "--enable-cache-report": (0, "usage always has it"),
    # llama-server
    "--jinja": (0, "chat templates are always Jinja's"),
    "--metrics": (0, "they are always there"),
    "--cont-batching": (0, "it is always on"),
    "-cb": (0, "it is always on"),
    "-t": (1, "there is a thread for each allowed core"),
    "--threads": (1, "there is a thread for each allowed core"),
    "-ngl": (1, "all layers are on --device"),
    "--gpu-layers": (1, "all layers are on --device"),
    "--n-gpu-layers": (1, "all layers are on --device"),
    "-fa": (1, "it is chosen automatically"),
    "--flash-attn": (1, "it is chosen automatically"),
}
"""What another engine needs, and why nothing does here: (number of its values, reason)."""
_FLAG: Final = re.compile(r"--?[A-Za-z].*")


def in_our_words(
    arguments: Sequence[str], known: Collection[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments with other engines' flags renamed or left out, and what was done.

    known: flags that mean what the program says, whatever they are elsewhere.
    """
    ours, notices = list[str](), list[str]()
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in IGNORED and name not in known:
            num_values, reason = IGNORED[name]
            if num_values and not equals and rest and not _FLAG.fullmatch(rest[-1]):
                argument += f" {rest.pop()}"
            notices.append(f"{argument} is ignored: {reason}")
        elif name in OTHER_NAMES and name not in {*known, *_OTHER_VALUES}:
            notices.append(f"{name} is {OTHER_NAMES[name]} here")
            ours.append(OTHER_NAMES[name] + equals + value)
        else:
            ours.append(name + equals + value)
    return ours, tuple(notices)
