"""The response object: what it was asked for, how it stands, what it has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nanocore.client.chat.events import Finished, Started
from nanocore.http.dialects.response_items import Item
from nanocore.http.dialects.usage import UsageSum
from nanocore.http.errors import HttpError


class ResponseStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says beside its events, and how it shows them.

    key: what the ids of the response and its items have in common. asked: fields of the response
    that tell what was asked for. num_top_logprobs: None if there are no logprobs.
    """

    key: str
    created_s: int
    asked: Mapping[str, Any]
    num_top_logprobs: int | None = None
    custom_tools: frozenset[str] = frozenset()
    reasoning_as_summary: bool = False

    @property
    def id(self) -> str:
        """The response's."""
        return f"resp_{self.key}"


class ResponseState:
    """A response, from its beginning to its end."""

    def __init__(self, style: ResponseStyle) -> None:
        self._style = style
        self._usage = UsageSum()
        self._seed: int | None = None
        self._finished: Finished | None = None

    def start(self, event: Started) -> None:
        """The engine has it."""
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        self._seed = event.seed

    def end(self, event: Finished) -> None:
        """All of it is there."""
        self._usage.add_sample(event.usage)
        self._finished = event

    @property
    def status(self) -> str:
        """Cut where max_output_tokens or the model's context ended, it is incomplete."""
        reason = "" if self._finished is None else self._finished.finish_reason
        if reason in ("stop", "tool_calls"):
            return "completed"
        return {"": "in_progress", "length": "incomplete"}.get(reason, "cancelled")

    def as_object(
        self, output: Sequence[Item] = (), error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """As clients get it. error: why it has failed."""
        status = "failed" if error is not None else self.status
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._style.id,
            "object": "response",
            "created_at": self._style.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": None if status == "in_progress" else self._usage_object(),
            "seed": self._seed,
            **self._style.asked,
        }

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }


def response_error(error: HttpError) -> dict[str, Any]:
    """A failed response's `error`, by the codes that clients know."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    if error.status == 429:
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}
