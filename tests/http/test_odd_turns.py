"""Turns as clients keep them: without content, refused, thought alone; with the demo model."""

from __future__ import annotations

from typing import Any

from tests.client.running import run
from tests.http.in_process import app_of

USER = {"role": "user", "content": "What is 1 + 2?"}
CALL = {"name": "add", "arguments": "{}"}


def rendered(endpoint: str, turns: list[dict[str, Any]]) -> list[str]:
    """The prompts of conversations with one such turn, which are answered, too."""

    async def send() -> list[str]:
        prompts = []
        async with app_of(endpoint) as (_, http):
            for turn in turns:
                body = {"messages": [USER, turn, USER], "max_tokens": 1}
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, (turn, answer.text)
                tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
                text = await http.post("/detokenize", json={"tokens": tokens})
                prompts.append(str(text.json()["prompt"]))
        return prompts

    return run(send())


def test_a_turn_without_content_has_an_empty_text(demo_endpoint: str) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "t"},
        {"role": "assistant", "reasoning": "t"},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "user", "content": None},
        {"role": "system"},
    ]
    empty: list[dict[str, Any]] = [{"role": turn["role"], "content": ""} for turn in turns]
    assert rendered(demo_endpoint, turns) == rendered(demo_endpoint, empty)


def test_a_refusal_is_the_turns_text(demo_endpoint: str) -> None:
    turns: list[dict[str, Any]] = [
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"content": "I cannot.", "refusal": None},
    ]
    for prompt in rendered(demo_endpoint, [{"role": "assistant", **turn} for turn in turns]):
        assert "assistant\nI cannot.<|im_end|>" in prompt
