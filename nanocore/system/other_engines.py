"""Flags of vLLM, SGLang, llama.cpp and Ollama: which of ours they are, and which need nothing here.

docs/coming-from.md says what to do instead of the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final

_CACHE_TYPE_FLAGS: Final = ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v")
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
    **dict.fromkeys(_CACHE_TYPE_FLAGS, "--kv-cache-dtype"),
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
    # Ollama's parameters, as flags
    "--num-ctx": "--max-model-len",
    "--num-parallel": "--max-num-seqs",
}
"""Our flag for each name in another engine; docs/coming-from.md lists the same."""
_OTHER_VALUES: Final = {
    "--kv-events-config", "--max-total-tokens", "--schedule-policy", "--enable-priority-scheduling",
    "--schedule-conservativeness", *_CACHE_TYPE_FLAGS, "-sm", "--split-mode", "--log-jsonl",
    "--reasoning-format", "--chat-template-kwargs", "--timeout", "--cors-origins",
}  # fmt: skip
"""Names of `OTHER_NAMES` whose values are not those of our flag: they are refused."""

_NUMBER: Final = r"-?\d+"
_LAYERS: Final = r"-?\d+|all|auto"
_LAYER_FLAGS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_READ_ONCE: Final = "weights are read once, at the start"
_SWITCH: Final = "on|off|auto|true|false|0|1"
IGNORED: Final = {
    # vLLM
    "--trust-remote-code": ("", "code of a model is never run"),
    "--enable-auto-tool-choice": ("", "tools need no flag"),
    "--enable-chunked-prefill": ("", "it is always on"),
    "--enable-tokenizer-info-endpoint": ("", "it is always there"),
    "--enable-prompt-tokens-details": ("", "usage always has them"),
    "--enable-request-id-headers": ("", "they are always sent"),
    "--swap-space": (_NUMBER, "preempted requests are recomputed"),
    "--disable-custom-all-reduce": ("", "there is one all-reduce"),
    # SGLang
    "--enable-metrics": ("", "they are always there"),
    "--enable-cache-report": ("", "usage always has it"),
    # llama-server
    "--jinja": ("", "chat templates are always Jinja's"),
    "--metrics": ("", "they are always there"),
    "--cont-batching": ("", "it is always on"),
    "-cb": ("", "it is always on"),
    "-t": (_NUMBER, "there is a thread for each allowed core"),
    "--threads": (_NUMBER, "there is a thread for each allowed core"),
    **dict.fromkeys(_LAYER_FLAGS, (_LAYERS, "all layers are on --device")),
    "-fa": (_SWITCH, "it is chosen automatically"),
    "--flash-attn": (_SWITCH, "it is chosen automatically"),
    "-ub": (_NUMBER, "--max-num-batched-tokens is the only budget"),
    "--ubatch-size": (_NUMBER, "--max-num-batched-tokens is the only budget"),
    "--embedding": ("", "/v1/embeddings is always there"),
    "--embeddings": ("", "/v1/embeddings is always there"),
    "--slots": ("", "`nanocore top` shows requests"),
    "--props": ("", "`nanocore top` shows requests"),
    "--no-warmup": ("", "there is none to leave out"),
    "--no-webui": ("", "the page costs nothing until it is opened"),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), ("", _READ_ONCE)),
    "-v": ("", "logs are complete, and a chat shows its speed"),
    "--verbose": ("", "logs are complete, and a chat shows its speed"),
}
"""What another engine needs, and why nothing does here: (pattern of its value or '', reason)."""

_DEFAULTS: Final = {
    "--tokenizer-mode": "auto|hf",
    "--distributed-executor-backend": "mp|uni",
    "--generation-config": "auto",
    "-c": "0",
    "--ctx-size": "0",
    "-np": "-1",
    "--parallel": "-1",
}
"""Patterns of values that are the default here: these are ignored, others are not."""

_VALUES: Final = {
    **{(name, "0"): ("--device", "cpu") for name in _LAYER_FLAGS},
    **{
        (name, theirs): ("--kv-cache-dtype", ours)
        for name in _CACHE_TYPE_FLAGS
        for theirs, ours in (("q8_0", "int8"), ("f16", "auto"), ("bf16", "auto"))
    },
}
"""Our flag and its value for values of theirs; of others see the other tables."""


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
        text = value if equals else "".join(rest[-1:])
        if name not in known and (meant := _VALUES.get((name, text))):
            if not equals:
                argument += f" {rest.pop()}"
            if _differs(ours, *meant):  # K's and V's types
                ours.append(argument)
                continue
            ours += meant
            notices.append(f"{argument} is {' '.join(meant)} here")
        elif name in IGNORED and name not in known:
            values, reason = IGNORED[name]
            # What is no value of it may be the model: llama.cpp's -fa took none before.
            if values and not equals and rest and re.fullmatch(values, rest[-1]):
                argument += f" {rest.pop()}"
            notices.append(f"{argument} is ignored: {reason}")
        elif name not in known and _is_default(name, text):
            if not equals:
                argument += f" {rest.pop()}"
            notices.append(f"{argument} is ignored: it is the default")
        elif name in OTHER_NAMES and name not in {*known, *_OTHER_VALUES}:
            notices.append(f"{name} is {OTHER_NAMES[name]} here")
            ours.append(OTHER_NAMES[name] + equals + value)
        else:
            ours.append(name + equals + value)
    return ours, tuple(notices)


def _is_default(name: str, value: str) -> bool:
    return name in _DEFAULTS and re.fullmatch(_DEFAULTS[name], value) is not None


def _differs(ours: Sequence[str], flag: str, value: str) -> bool:
    """Whether the flag is there already, with another value."""
    return any(one == flag and other != value for one, other in pairwise(ours))
