"""EngineChatTarget: a chat with an engine over the wire, launched by this command or joined.

A launched engine ends with the target, and logs to a file. An engine that has used up its restarts
is started again by the next question.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from nanocore.cli.chat.files import EngineLog
from nanocore.cli.chat.target import FALLBACK_NOTE, FALLBACK_TEMPLATE, Message, Resumed, TargetEvent
from nanocore.cli.engine_choice import EngineChoice, engine_client
from nanocore.client import AsyncEngineClient
from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)


class EngineChatTarget:
    """A target from `open` to `close`, for one response at a time.

    All but `close` may raise NanocoreError with text for the user. log: of the engine to launch;
    None: an engine is joined. chat_template: see `ChatOptions`.
    """

    def __init__(
        self, choice: EngineChoice, log: EngineLog | None, chat_template: str | None
    ) -> None:
        self._choice = choice
        self._log = log
        self._chat_template = chat_template
        self._has_fallen_back = False
        self._client: AsyncEngineClient | None = None
        self._supervisor: EngineSupervisor | None = None  # of the launched engine

    async def open(self) -> None:
        """Connect, and find out the model."""
        log = self._log
        client = engine_client(
            self._choice, None if log is None else lambda: self._new_supervisor(log.fd)
        )
        await client.__aenter__()
        self._client = client
        self._has_fallen_back = False

    async def close(self) -> None:
        """Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def model(self) -> str:
        """Name of the model, or ''."""
        return "" if self._client is None else self._client.model_card.model

    @property
    def max_model_len(self) -> int | None:
        """Context length in tokens, if known."""
        return None if self._client is None else self._client.model_card.max_model_len

    @property
    def default_sampling(self) -> Mapping[str, Any] | None:
        """Sampling parameters that the model recommends; None: unknown, the server's apply."""
        if self._client is None:
            return None
        values: dict[str, Any] = msgspec.to_builtins(self._client.model_card.default_sampling)
        return values

    @property
    def is_connected(self) -> bool:
        """Whether the target can be reached, as far as known."""
        return self._client is not None and self._client.is_connected

    def facts(self) -> Mapping[str, str]:
        """Return what is known of the model, in addition to its name."""
        if self._client is None:
            return {}
        card = self._client.model_card
        template = "the model's"
        if self._chat_template is not None:
            template = "set by --chat-template"
        elif self._has_fallen_back:
            template = f"{FALLBACK_TEMPLATE}, as the model has none"
        return {
            "context": f"{card.max_model_len:,} tokens",
            "architecture": card.architecture,
            "dtype": card.dtype,
            "chat template": template,
        }

    async def ask(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[TargetEvent, None]:
        """Stream the response to a conversation; closing the generator aborts the request."""
        if self._client is None or (
            self._supervisor is not None and self._supervisor.ended is not None
        ):
            await self.close()
            await self.open()
        client = self._client
        assert client is not None, "it is open"
        recommended = SamplingParams.from_engine(client.model_card.default_sampling)
        params = replace(recommended, **sampling)
        num_resumes = 0
        response = await client.submit_chat(
            cast("Sequence[ChatMessage]", messages),
            params,
            fit_max_tokens=True,
            chat_template=await self._template(client),
        )
        events = response.events()
        try:
            async for event in events:
                for resume in response.request.resumes[num_resumes:]:
                    num_resumes += 1
                    yield Resumed(resume.num_output_tokens, resume.is_exact)
                yield event
        finally:
            await events.aclose()

    async def _template(self, client: AsyncEngineClient) -> str | None:
        given = self._chat_template
        if given is not None or (await client.get_tokenizer()).templates().has_default:
            return given
        if not self._has_fallen_back:
            logger.warning(FALLBACK_NOTE)
            self._has_fallen_back = True
        return FALLBACK_TEMPLATE

    async def models(self) -> list[str]:
        """Return names for `switch`, as far as known."""
        return [self.model] if self.model else []

    async def switch(self, model: str) -> None:
        """Raise InvalidRequestError: a server may have several models, an engine has one."""
        raise InvalidRequestError(
            f"an engine keeps its model: end this chat, and start `nanocore chat {model}`"
        )

    def _new_supervisor(self, log_fd: int) -> EngineSupervisor:
        choice = self._choice
        self._supervisor = EngineSupervisor(choice.flags, choice.max_restarts, output_fd=log_fd)
        return self._supervisor
