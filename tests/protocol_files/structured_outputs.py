"""Structured outputs in SUBMITs: valid ones of each kind, and what no engine takes.

What a model's tokenizer makes of them is not known here, so the valid ones are short and of ASCII.
What only compiling finds has no vectors: an engine without the capability refuses it, too.
"""

from __future__ import annotations

from typing import Any

from tests.protocol_files.lines import Body

SCHEMA = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'
STRUCTURE: Body = {"begin": "<f>", "schema": '{"type":"integer"}', "end": "</f>"}
TAG: Body = {"structures": [STRUCTURE], "triggers": ["<f"]}
MAX_BYTES = 136 * 2**10
VALID: dict[str, Body] = {
    "json": {"json": SCHEMA},
    "json-of-anything": {"json": "true"},
    "json-without-whitespace": {"json": SCHEMA, "disable_any_whitespace": True},
    "json-longest": {"json": '{"type":"integer"}'.ljust(MAX_BYTES)},
    "regex": {"regex": "[ab]{1,3}"},
    "choice": {"choice": ["yes", "no"]},
    "choice-of-one": {"choice": ["a"]},
    "choice-of-4096": {"choice": [f"{i:x}" for i in range(4096)]},
    "grammar": {"grammar": 'start: "a" | "b" start'},
    "json-object": {"json_object": True},
    "structural-tag": {"structural_tag": TAG},
    "structural-tag-of-two": {
        "structural_tag": {
            "structures": [STRUCTURE, STRUCTURE | {"begin": "<g>"}], "triggers": ["<f", "<g"],
        }
    },
    "after-reasoning": {"json": SCHEMA, "reasoning": {"begin": "<think>", "end": "</think>"}},
    "within-reasoning": {"choice": ["a"], "reasoning": {"end": "</think>"}},
    "or-free": {"json": SCHEMA, "free_prefixes": ["<tool_call>", "[f("]},
    "or-free-after-reasoning": {
        "choice": ["a"], "reasoning": {"end": "</think>"}, "free_prefixes": ["b"]
    },
    "free-prefixes-256": {"choice": ["a"], "free_prefixes": [f"b{i:x}" for i in range(256)]},
    "free-prefixes-none": {"choice": ["a"], "free_prefixes": []},
    "lenient": {"json": SCHEMA, "lenient": [""]},
    "lenient-parts": {"json": SCHEMA, "lenient": ["/$defs/a", "/$defs/b"]},
    "other-kinds-nil": {
        "json": None, "regex": "a", "choice": None, "grammar": None, "json_object": False,
        "structural_tag": None, "disable_any_whitespace": False, "reasoning": None,
    },
}  # fmt: skip
WRONG: dict[str, tuple[Any, ...]] = {
    "json": (1, True, b"{}", {"type": "integer"}, ["{}"]),
    "regex": (1, True, b"a", ["a"]),
    "choice": ("a", 1, {}, [1], [None], [b"a"], [["a"]]),
    "grammar": (1, b"a", ["a"]),
    "json_object": (1, "true", None, {}),
    "structural_tag": (
        1, "{}", [], {}, {"structures": [STRUCTURE]}, {"triggers": ["<f"]},
        TAG | {"structures": {}}, TAG | {"structures": [1]}, TAG | {"structures": [{}]},
        TAG | {"triggers": "<f"}, TAG | {"triggers": [1]}, TAG | {"new": 1},
        TAG | {"structures": [STRUCTURE | {"begin": 1}]},
        TAG | {"structures": [STRUCTURE | {"schema": {"type": "integer"}}]},
        TAG | {"structures": [STRUCTURE | {"end": None}]},
        TAG | {"structures": [STRUCTURE | {"new": 1}]},
        TAG | {"structures": [{"begin": "<f>", "schema": "true"}]},
    ),
}  # fmt: skip
"""Values of other types, and maps with other fields, by kind."""
WRONG_REASONING = (
    1, "</think>", {}, {"begin": "<think>"}, {"end": ""}, {"end": None},
    {"begin": None, "end": "a"}, {"end": "a", "new": 1},
)  # fmt: skip


WRONG_LENIENT = (1, None, "/a", {}, [1], [None], [b""], ["a"], [""] * 1025)
WRONG_FREE_PREFIXES = (1, None, "<f>", {}, [1], [None], [b"a"], ["a", ""], ["a"] * 257)


def malformed() -> dict[str, Any]:
    """By name: what stands in `structured_outputs`."""
    of_kinds = {
        f"{kind.replace('_', '-')}-wrong-{i}": {kind: value}
        for kind, values in WRONG.items()
        for i, value in enumerate(values)
    }
    tags: dict[str, Body] = {
        "without-structures": {"structures": []},
        "of-129-structures": {"structures": [STRUCTURE] * 129},
        "without-triggers": {"triggers": []},
        "of-129-triggers": {"triggers": ["<f"] * 129},
        "with-an-empty-trigger": {"triggers": ["<f", ""]},
        "that-no-trigger-begins": {"triggers": ["<g"]},
    }
    return of_kinds | {
        "of-no-kind": {},
        "of-no-kind-without-whitespace": {"disable_any_whitespace": True},
        "of-two-kinds": {"json": "{}", "regex": "a"},
        "of-two-kinds-one-of-them-empty": {"regex": "", "choice": ["a"]},
        "of-six-kinds": {
            "json": "{}", "regex": "a", "choice": ["a"], "grammar": 'start: "a"',
            "json_object": True, "structural_tag": TAG,
        },
        "with-an-unknown-kind": {"json_schema": "{}"},
        "with-an-unknown-field": {"json": "{}", "backend": "auto"},
        "whitespace-wrong": {"json": "{}", "disable_any_whitespace": 1},
        **{
            f"reasoning-wrong-{i}": {"json": "{}", "reasoning": value}
            for i, value in enumerate(WRONG_REASONING)
        },
        **{
            f"free-prefixes-wrong-{i}": {"json": "{}", "free_prefixes": value}
            for i, value in enumerate(WRONG_FREE_PREFIXES)
        },
        **{
            f"lenient-wrong-{i}": {"json": "{}", "lenient": value}
            for i, value in enumerate(WRONG_LENIENT)
        },
        "lenient-without-json": {"regex": "a", "lenient": [""]},
        "free-prefixes-alone": {"free_prefixes": ["a"]},
        "free-prefixes-too-long": {
            "json": '{"type":"integer"}'.ljust(MAX_BYTES - 4), "free_prefixes": ["abc", "de"]
        },
        "json-too-long": {"json": '{"type":"integer"}'.ljust(MAX_BYTES + 1)},
        "regex-too-long-in-bytes": {"regex": "é" * (MAX_BYTES // 2) + "e"},
        "choice-empty": {"choice": []},
        "choice-of-an-empty-text": {"choice": ["a", ""]},
        "choice-of-4097": {"choice": [f"{i:x}" for i in range(4097)]},
        **{f"structural-tag-{name}": {"structural_tag": TAG | tag} for name, tag in tags.items()},
    }  # fmt: skip
