"""AsyncEngineClient: the asyncio SDK. It launches an engine, or joins a running one.

Tokenizes, submits, streams, and raises typed exceptions. Leaving a `generate` iterator, or
cancelling its task, aborts the request. A client belongs to the event loop in which it is entered,
and raises ClientStateError in any other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from typing import Unpack

from nanocore.client.arguments import (
    check_after,
    check_request_id,
    check_request_timeout,
    check_sampling_params,
)
from nanocore.client.base_client import BaseClient
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import is_long
from nanocore.client.chat.chat_request import ChatOptions, prepare_chat
from nanocore.client.chat.events import ChatEvent
from nanocore.client.chat.parsing.reasoning import PlainTextParser
from nanocore.client.connection.control_calls import EngineHealth
from nanocore.client.requests.request_outputs import (
    EmbeddingOutput,
    RequestOutput,
    embedding_params,
)
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.scoring import ScoreOutput, score_request
from nanocore.client.requests.submission import Prompt, RequestOptions, SubmitTicket, submit
from nanocore.client.tokenizer import ChatMessage
from nanocore.protocol.errors import InvalidRequestError, ProtocolError
from nanocore.protocol.messages import ADMIN_OPERATIONS, ControlOperation, Reply
from nanocore.protocol.metrics import Metric, RecentSteps, Stats
from nanocore.protocol.sampling import Pooling, SamplingParams

HEALTH_TIMEOUT_S = 5.0
STEPS_SINCE = 11
"""Minor version of the protocol that brought CONTROL `steps`."""


class AsyncEngineClient(BaseClient):
    """A client of one engine; use `launch` or `connect`, and `async with`.

    If the session with the engine is lost, open requests continue, token for token, in the next
    session, with whichever engine serves then (`RequestOutput.resumes`). Other calls fail and must
    be repeated. With `resume=False` requests fail, too.

    Every method raises ClientStateError before the client is entered, after it is closed, and in
    another event loop than the one in which it was entered. `pause`, `drain` and
    `reset_prefix_cache` raise InvalidRequestError for a client whose key has the role user.
    """

    # -- requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a completion; each output holds everything so far and what is new.

        With n above 1 an output has all samples; those without news have an empty delta.

        Args:
            prompt: text, token ids, or {"prompt_token_ids": [...]}. Ids that are an array("i") are
                sent as they are, which for long prompts is much cheaper than a list.
            request_id: unique among this client's running requests.
            priority: lower values go first, in engines with --scheduling-policy priority; others
                refuse all but 0.
            cache_salt: share cached prefixes only with requests of the same salt.
            timeout_s: time after which it ends with finish_reason "timeout", even while it waits.

        Raises:
            InvalidRequestError, ContextLengthError: the request cannot be served as it is.
            EngineDeadError: the engine is gone.
        """
        options = RequestOptions(request_id, priority, cache_salt, timeout_s)
        stream = await self._submit(prompt, sampling_params, options)
        try:
            while not stream.finished:  # `async for` would cost a coroutine for each token
                output = stream.read()
                if output is not None:
                    yield output
                    if stream.progress.is_behind:
                        await asyncio.sleep(0)
                else:
                    self._check_loop()  # no other event loop would wake us
                    await stream.news()
        finally:
            stream.close()

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatEvent, None]:
        """Stream the assistant's answer to a conversation; `collect` joins the events.

        Args:
            options: see `ChatOptions`: tools, tool_choice, response_format and others.
        """
        answer = await self.submit_chat(
            messages,
            sampling_params,
            request_id,
            priority,
            cache_salt,
            timeout_s=timeout_s,
            **options,
        )
        events = answer.events()
        async with aclosing(events):  # leaving this generator aborts the request at once
            async for event in events:
                yield event

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        fit_max_tokens: bool = False,
        timeout_s: float | None = None,
        ticket: SubmitTicket | None = None,
    ) -> AnswerStream:
        """Send a completion; its output is read from an AnswerStream as text events.

        `AnswerStream.request.listen` serves many requests without a task for each.

        Args:
            fit_max_tokens: limit max_tokens to what the prompt leaves of max_model_len.
            ticket: place in the order of submission, from `submit_tickets`.
        """
        with ticket or SubmitTicket(self._tickets) as taken:
            session = await self._session(_wait_s(timeout_s))
            tokenizer = await session.tokenizer.get()
            options = RequestOptions(request_id, priority, cache_salt, timeout_s, fit_max_tokens)
            stream = await submit(session, prompt, sampling_params, options, taken)
        return AnswerStream(stream, PlainTextParser, tokenizer)

    async def submit_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        fit_max_tokens: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AnswerStream:
        """Send a conversation and return its AnswerStream. Arguments: see `chat` and `submit`."""
        params = sampling_params
        if params is None:
            params = SamplingParams.from_engine(self.model_card.default_sampling)
        check_sampling_params(params)
        with SubmitTicket(self._tickets) as ticket:
            session = await self._session(_wait_s(timeout_s))
            has_much_text = is_long(messages, options.get("tools"))
            if has_much_text:
                ticket.give_way()
            max_model_len = session.connection.welcome.model.max_model_len
            chat = await session.tokenizer.run(
                lambda tokenizer: prepare_chat(messages, options, tokenizer, params, max_model_len),
                has_much_text,
            )
            request = RequestOptions(request_id, priority, cache_salt, timeout_s, fit_max_tokens)
            stream = await submit(session, chat.prompt_token_ids, chat.params, request, ticket)
            tokenizer = await session.tokenizer.get()
        return AnswerStream(
            stream,
            chat.new_parser,
            tokenizer,
            chat.reasoning_end,
            chat.omits_tools,
            chat.form_names,
        )

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        ticket: SubmitTicket | None = None,
    ) -> RequestOutput:
        """Return the last output of a completion. Arguments: see `generate` and `submit`."""
        options = RequestOptions(request_id, priority, cache_salt, timeout_s)
        stream = await self._submit(prompt, sampling_params, options, ticket)
        return await stream.final()

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        ticket: SubmitTicket | None = None,
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt: the model's hidden state after its last norm.

        Args:
            pooling: of the "last" token, or the "mean" over all.
            normalize: to length 1.
            ticket: as in `submit`.

        Raises:
            NanocoreError: as in `generate`, or the request was aborted or ended by the engine.
        """
        params = embedding_params(pooling)
        output = await self.complete(
            prompt, params, request_id, priority, cache_salt, ticket=ticket
        )
        return EmbeddingOutput.of(output, normalize, self.model_card.hidden_size)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "abort". Idempotent."""
        manager = self._check_loop()
        manager.abort(check_request_id(request_id, manager.welcome.limits.max_request_id_chars))

    # -- the engine -------------------------------------------------------------------------------

    @contextmanager
    def submit_tickets(self, number: int) -> Iterator[list[SubmitTicket]]:
        """Reserve places in the order of submission, for requests whose preparation takes long.

        Each ticket is passed to one call of `submit`, `complete` or `embed`.
        """
        with ExitStack() as stack:
            yield [stack.enter_context(SubmitTicket(self._tickets)) for _ in range(number)]

    async def stats(self) -> Stats:
        """The engine's counters and gauges."""
        stats = (await self._control("stats")).stats
        assert stats is not None
        return stats

    async def metrics(self) -> list[Metric]:
        """All metrics of the engine; docs/observability.md has the names.

        Raises:
            ProtocolError: the engine is too old.
        """
        reply = await self._control("metrics")
        if reply.metrics is None:
            raise ProtocolError(f"the engine reports no metrics: {reply.message}")
        return reply.metrics

    async def recent_steps(self, after: int = 0) -> RecentSteps:
        """Return the engine's last steps, and timelines of open and recently finished requests.

        Args:
            after: only steps with larger numbers; requests are always included.

        Raises:
            ProtocolError: the engine is too old.
        """
        after = check_after(after)
        connection = (await self._session()).connection
        major, minor = connection.welcome.protocol
        if minor < STEPS_SINCE:  # it would refuse the message, and the call would get no reply
            raise ProtocolError(
                f"steps came with protocol {major}.{STEPS_SINCE}, and this engine speaks "
                f"{major}.{minor}: use a newer engine"
            )
        reply = await connection.calls.control("steps", after=after)
        if reply.steps is None:
            raise ProtocolError(f"the engine reports no steps: {reply.message}")
        return reply.steps

    async def health(self) -> EngineHealth:
        """Ping the engine; raises EngineDeadError without a reply."""
        return await (await self._session()).connection.calls.ping(HEALTH_TIMEOUT_S)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; returns False, without effect, while a request holds blocks."""
        return (await self._control("reset_prefix_cache")).ok

    async def score(
        self,
        context: Prompt,
        continuation: Prompt,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ScoreOutput:
        """Log probability of a continuation given its context: the sum over its tokens.

        Two texts are tokenized as one, and spaces at the end of the context belong to the
        continuation. An empty context is replaced by the model's BOS, or else its EOS. Token ids
        are used as they are.

        Raises:
            InvalidRequestError: one of them has no tokens.
            ContextLengthError: without the last token they exceed max_model_len.
            EngineDeadError: the engine is gone.
        """
        with SubmitTicket(self._tickets) as ticket:
            if is_long(*(text for text in (context, continuation) if isinstance(text, str))):
                ticket.give_way()
            session = await self._session(math.inf)
            vocab_size = session.connection.welcome.model.vocab_size
            request = await score_request(session.tokenizer, context, continuation, vocab_size)
            options = RequestOptions(request_id, priority, cache_salt)
            stream = await self._submit(request.prompt, request.params, options, ticket)
        return request.score(await stream.final())

    async def pause(self) -> None:
        """Stop computing steps. Requests are accepted, and continue after `resume`."""
        await self._control("pause")

    async def resume(self) -> None:
        """End this session's pause; the engine continues once no session pauses it."""
        await self._control("resume")

    async def drain(self) -> None:
        """Drain the engine: it finishes open requests, takes no new ones, and stops."""
        await self._control("drain")

    async def _control(self, operation: ControlOperation) -> Reply:
        connection = (await self._session()).connection
        reply = await connection.calls.control(operation)
        is_user = operation in ADMIN_OPERATIONS and connection.welcome.role == "user"
        if not reply.ok and (is_user or operation in ("pause", "drain")):
            raise InvalidRequestError(reply.message or f"{operation} is refused")
        return reply

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        ticket: SubmitTicket | None = None,
    ) -> RequestStream:
        with ticket or SubmitTicket(self._tickets) as taken:
            session = await self._session(_wait_s(options.timeout_s))
            return await submit(session, prompt, params, options, taken)


def _wait_s(timeout_s: float | None) -> float:
    check_request_timeout(timeout_s)
    return math.inf if timeout_s is None else timeout_s
