"""ChatTurn: one response of an engine or a server to chat with, and what they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.client.chat.events import (
    AnswerCollector,
    ChatAnswer,
    ChatEvent,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.system.standard_streams import harmless

FALLBACK_TEMPLATE: Final = "chatml"
FALLBACK_NOTE: Final = (
    "the model has no chat template: ChatML is used, and may not suit it; --chat-template names "
    "another one"
)
Message: TypeAlias = dict[str, Any]
"""A message of OpenAI's API."""


class Resumed(msgspec.Struct, frozen=True):
    """Another engine took the request over. num_output_tokens: received before. is_exact: the
    output is the same as without the change."""

    num_output_tokens: int
    is_exact: bool


TargetEvent: TypeAlias = ChatEvent | Resumed


class TurnStats(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and timings of a turn; None is unknown.

    tokens_per_s: output tokens since the question was sent.
    """

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None

    @property
    def num_context_tokens(self) -> int | None:
        """Lower bound of the next prompt's length."""
        if self.num_prompt_tokens is None:
            return None
        return self.num_prompt_tokens + (self.num_output_tokens or 0)


class ChatTurn:
    """One response. It starts when it is created, as the question is sent. now_s: monotonic
    clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._start_s = now_s()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._collector = AnswerCollector()
        self._started: Started | None = None
        self._usage: Usage | None = None

    def add(self, event: TargetEvent) -> None:
        if isinstance(event, Resumed):
            return
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            self._last_s = self._now_s()
            if self._first_s is None:
                self._first_s = self._last_s
        elif isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self._usage = event.usage
        self._collector.add(event)

    @property
    def answer(self) -> ChatAnswer:
        """The response so far."""
        answers = self._collector.answers()
        return answers[0] if answers else ChatAnswer()

    def message(self) -> Message | None:
        """Return the assistant's message; None if nothing has arrived."""
        answer = self.answer
        if answer.content or answer.reasoning or answer.tool_calls or answer.finish_reason:
            return answer.to_message()
        return None

    def stats(self) -> TurnStats:
        usage, started = self._usage, self._started
        ttft_s = None if self._first_s is None else self._first_s - self._start_s
        if usage is None:
            num_prompt = len(started.prompt_token_ids) if started is not None else 0
            return TurnStats(
                num_prompt_tokens=num_prompt or None,
                num_cached_tokens=started.num_cached_tokens if started and num_prompt else None,
                ttft_s=ttft_s,
            )
        took_s, num_output = self._last_s - self._start_s, usage.num_output_tokens
        return TurnStats(
            num_prompt_tokens=usage.num_prompt_tokens or None,  # 0: the server does not count
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=num_output or None,
            ttft_s=ttft_s,
            tokens_per_s=num_output / took_s if num_output and took_s > 0 else None,
        )


def incompleteness(answer: ChatAnswer, stats: TurnStats, max_model_len: int | None) -> str:
    """Return why a response is incomplete, or ''."""
    used = stats.num_context_tokens
    if answer.finish_reason == "length":
        if used is not None and max_model_len is not None and used >= max_model_len:
            return f"truncated: the context of {max_model_len:,} tokens is full; /new starts afresh"
        return "truncated at max_tokens; /set max_tokens=N allows more"
    if answer.finish_reason in ("abort", "timeout", "error"):
        return f"ended early: {answer.message or answer.finish_reason}; /retry asks again"
    return answer.message or ""


def status_line(model: str, stats: TurnStats, max_model_len: int | None, num_columns: int) -> str:
    """Return as many known values as fit, the model's name first."""
    parts = [harmless(model).rstrip("/").rpartition("/")[2] or "no model"]
    used = stats.num_context_tokens
    if used is not None:
        most = "" if max_model_len is None else f"/{max_model_len:,}"
        parts.append(f"context {used:,}{most}")
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:,.0f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first {stats.ttft_s * 1e3:,.0f} ms")
    if stats.num_prompt_tokens is not None:
        cached = f" ({stats.num_cached_tokens:,} cached)" if stats.num_cached_tokens else ""
        parts.append(f"prompt {stats.num_prompt_tokens:,}{cached}")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 > num_columns:
            break
        line += f" | {part}"
    return line[:num_columns]
