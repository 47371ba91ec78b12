"""Bodies that mean no good: what is no JSON, or JSON that no parser likes, and wrong values within.

Each endpoint has one good body, rich in fields; `mutated` puts wrong values into any place of it.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Final

MAX_BODY_BYTES: Final = 8 * 2**20
_DEPTH: Final = 100_000
_SURROGATE: Final = '"\\ud800"'
_ESCAPED: Final = "\\u0000\\u00e9"


def no_bodies(good: dict[str, Any]) -> dict[str, bytes]:
    """By a name that says what it is. good: a body that would be served."""
    whole = json.dumps(good)
    inside = whole[1:-1]
    return {
        "nothing": b"",
        "half": whole[: len(whole) // 2].encode(),
        "null": b"null",
        "array": b"[]",
        "string": b'"x"',
        "number": b"1",
        "nan": b'{"temperature": NaN}',
        "infinity": b'{"temperature": Infinity}',
        "too large a float": f'{{{inside}, "temperature": 1e999}}'.encode(),
        "digits": f'{{{inside}, "seed": {"9" * 100_000}}}'.encode(),
        "small float": f'{{{inside}, "temperature": 1e-{"9" * 100}}}'.encode(),
        "brackets": b"[" * _DEPTH,
        "closed brackets": b"[" * _DEPTH + b"]" * _DEPTH,
        "braces": b'{"a":' * _DEPTH,
        "deep field": f'{{{inside}, "metadata": {"[" * _DEPTH}{"]" * _DEPTH}}}'.encode(),
        "less deep field": f'{{{inside}, "metadata": {"[" * 900}{"]" * 900}}}'.encode(),
        "surrogate": f'{{{inside}, "user": {_SURROGATE}}}'.encode(),
        "surrogate in a key": f"{{{inside}, {_SURROGATE}: 1}}".encode(),
        "no UTF-8": whole.encode()[:-1] + b', "user": "\xff\xfe"}',
        "overlong UTF-8": whole.encode()[:-1] + b', "user": "\xc0\x80"}',
        "UTF-8 of a surrogate": whole.encode()[:-1] + b', "user": "\xed\xa0\x80"}',
        "byte order mark": b"\xef\xbb\xbf" + whole.encode(),
        "UTF-16": whole.encode("utf-16"),
        "keys twice": f"{{{inside}, {inside}}}".encode(),
        "a NUL": whole.encode().replace(b":", b":\x00", 1),
        "NUL behind": whole.encode() + b"\x00",
        "two bodies": whole.encode() * 2,
        "comment": b"/* */" + whole.encode(),
        "comma": whole[:-1].encode() + b",}",
        "quotes": repr(good).encode(),
        "long string": f'{{{inside}, "user": "{"x" * (MAX_BODY_BYTES - 4096)}"}}'.encode(),
        "escapes": f'{{{inside}, "user": "{_ESCAPED * 2**19}"}}'.encode(),
        "long key": f'{{{inside}, "{"k" * 2**20}": 1}}'.encode(),
        "keys": json.dumps({**good, **{f"k{i}é\r\n": i for i in range(50_000)}}).encode(),
        "one byte too many": whole.encode().ljust(MAX_BODY_BYTES + 1),
    }


VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1,
    10**400, "", "x", "\x00", "\r\n", "é\u2028\U0001f600", "\ufdd0", "x" * 5000, "{% for %}",
    "{{ 7 * 7 }}", "<|im_start|>system", "../../etc/passwd", [], [None], [[]], [{}], ["x"] * 300,
    [1, "a", None], {}, {"": ""}, {"type": "x"}, {"type": None}, {"type": "text"},
    {"type": "text", "text": None}, {"type": "function"}, {"type": "function", "function": 5},
    {"role": "user"}, {"role": 5, "content": []}, {"$ref": "#"}, {"x": {"x": {"x": [[[[[]]]]]}}},
)  # fmt: skip


def mutated(rng: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three wrong values somewhere in it."""
    body = copy.deepcopy(good)
    for _ in range(rng.randint(1, 3)):
        tickets = list(_places(body))
        if not tickets:
            break
        holder, key = rng.choice(tickets)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(rng.choice(VALUES)))
            case 1:
                holder[rng.choice(("x", "", "type", "role", "content", "n"))] = rng.choice(VALUES)
            case 2:
                holder[key] = [holder[key]]
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return body


def _places(value: Any) -> Any:
    """(what holds it, by which key) of every value within."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


_TOOL: Final = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
GOOD: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "u"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "max_tokens": 1,
        "temperature": 0.5,
        "n": 1,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": "none",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object"}},
        },
        "chat_template_kwargs": {"enable_thinking": True},
        "metadata": {"a": "b"},
    },
    "/v1/completions": {
        "model": "demo",
        "prompt": ["hi", "there"],
        "max_tokens": 1,
        "temperature": 0.5,
        "n": 1,
        "echo": True,
        "logprobs": 1,
        "stop": ["a", "b"],
        "seed": 5,
        "stop_token_ids": [3],
        "allowed_token_ids": [5, 6, 7],
        "stream_options": {"include_usage": True},
        "truncate_prompt_tokens": 5,
    },
    "/v1/embeddings": {
        "model": "demo",
        "input": [[5], [1, 2, 3]],
        "encoding_format": "base64",
        "pooling": "mean",
        "normalize": True,
        "truncate_prompt_tokens": 5,
    },
    "/tokenize": {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "return_token_strs": True,
        "tools": [{"type": "function", "function": _TOOL}],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
    "/v1/responses": {
        "model": "demo",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        ],
        "max_output_tokens": 1,
        "tools": [{"type": "function", **_TOOL, "strict": False}, {"type": "web_search"}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "demo",
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}],
            },
        ],
        "max_tokens": 1,
        "stop_sequences": ["a"],
        "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
}
"""By path: max_tokens stays small where nothing is changed."""
