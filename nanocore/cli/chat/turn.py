"""Turn: one answer as it comes, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from nanocore.cli.chat.target import Message, Resumed, TargetEvent
from nanocore.client.chat.events import (
    AnswerCollector,
    ChatAnswer,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn took; None: nobody has said.

    tokens_per_s: of the answer, on average since the question was sent.
    """

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None

    @property
    def num_context_tokens(self) -> int | None:
        """Of the next prompt at least."""
        if self.num_prompt_tokens is None:
            return None
        return self.num_prompt_tokens + (self.num_output_tokens or 0)


class Turn:
    """From its making, which is when the question is sent. now_s: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._start_s = now_s()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._collector = AnswerCollector()
        self._started: Started | None = None
        self._usage: Usage | None = None

    def add(self, event: TargetEvent) -> None:
        """The next one."""
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
        """As far as it has come."""
        answers = self._collector.answers()
        return answers[0] if answers else ChatAnswer()

    def message(self) -> Message | None:
        """The assistant's turn; None if nothing has come."""
        answer = self.answer
        if answer.content or answer.reasoning or answer.tool_calls or answer.finish_reason:
            return answer.to_message()
        return None

    def figures(self) -> Figures:
        """What it took so far."""
        usage, started = self._usage, self._started
        ttft_s = None if self._first_s is None else self._first_s - self._start_s
        if usage is None:
            num_prompt = len(started.prompt_token_ids) if started is not None else 0
            return Figures(
                num_prompt_tokens=num_prompt or None,
                num_cached_tokens=started.num_cached_tokens if started and num_prompt else None,
                ttft_s=ttft_s,
            )
        took_s, num_output = self._last_s - self._start_s, usage.num_output_tokens
        return Figures(
            num_prompt_tokens=usage.num_prompt_tokens or None,  # 0: a server does not count
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=num_output or None,
            ttft_s=ttft_s,
            tokens_per_s=num_output / took_s if num_output and took_s > 0 else None,
        )


def ending(answer: ChatAnswer, figures: Figures, max_model_len: int | None) -> str:
    """Why an answer is no whole one, or ''."""
    used = figures.num_context_tokens
    if answer.finish_reason == "length":
        if used is not None and max_model_len is not None and used >= max_model_len:
            return f"cut: the context of {max_model_len:,} tokens is full; /new begins anew"
        return "cut: it is as long as max_tokens allows"
    if answer.finish_reason in ("abort", "timeout", "error"):
        return f"it ended early: {answer.message or answer.finish_reason}; /retry asks again"
    return answer.message or ""
