"""Token counts of an answer, as OpenAI's APIs show them."""

from __future__ import annotations

from typing import Any

from nanocore.client.chat.events import Usage


class UsageSum:
    """Of all samples and prompts of a request."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt, once however many samples it has."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def add_sample(self, usage: Usage) -> None:
        """A sample that has ended."""
        self.num_output_tokens += usage.num_output_tokens
        self.num_reasoning_tokens += usage.num_reasoning_tokens

    def as_object(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }
