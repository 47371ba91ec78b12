"""AsyncEngineClient: the asyncio SDK. It owns an engine, or joins one that runs.

Tokenizes, submits, streams, and turns whatever goes wrong into typed exceptions. Leaving a
`generate` iterator, or cancelling its task, aborts the request.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypedDict

from nanocore.client.connection import EngineConnection, EngineHealth
from nanocore.client.file_cache import FileCache
from nanocore.client.launcher import EngineArgument, EngineProcess
from nanocore.client.model_files import ModelFiles
from nanocore.client.outputs import RequestOutput
from nanocore.client.stream import RequestStream
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.client.tokenizer_loader import TokenizerLoader
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.endpoint_lock import own_default_endpoint
from nanocore.protocol.errors import EngineDeadError, InvalidRequestError, NanocoreError
from nanocore.protocol.messages import ControlOperation, ModelCard, Reply, Stats, Submit
from nanocore.protocol.sampling import SamplingParams
from nanocore.protocol.sockets import ClientKeys, client_keys

HEALTH_TIMEOUT_S = 5.0


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int] | array[int]


Prompt: TypeAlias = "str | list[int] | array[int] | TokensPrompt"


class AsyncEngineClient:
    """A client of one engine; use `launch` or `connect`, and `async with`."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        engine_args: dict[str, EngineArgument] | None,
        tokenizer: str | Path | None,
        timeout_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._engine_args = engine_args
        self._tokenizer_folder = None if tokenizer is None else Path(tokenizer)
        self._timeout_s = timeout_s
        self._process: EngineProcess | None = None
        self._process_watch: asyncio.Task[None] | None = None
        self._connection: EngineConnection | None = None
        self._files: ModelFiles | None = None
        self._tokenizer: TokenizerLoader | None = None

    @classmethod
    def launch(
        cls,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        start_timeout_s: float = 600.0,
        **engine_args: EngineArgument,
    ) -> Self:
        """A client with an engine process of its own, which ends with it.

        Args:
            model: model folder; None is the bundled demo model.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            start_timeout_s: how long the engine may take to load.
            engine_args: flags of `nanocore-engine`, e.g. max_num_seqs=8.

        Raises (on entering):
            EngineStartError: with the engine's own reason.
        """
        args = {"model": None if model is None else str(model), **engine_args}
        return cls(endpoint=None, engine_args=args, tokenizer=tokenizer, timeout_s=start_timeout_s)

    @classmethod
    def connect(
        cls,
        endpoint: str | None = None,
        *,
        curve_dir: str | Path | None = None,
        tokenizer: str | Path | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """A client of a running engine, by default the user's default one.

        Nothing of the model needs to be on this machine: see `get_tokenizer`.

        Args:
            endpoint: ipc:///path/engine.sock or tcp://host:port.
            curve_dir: folder with this client's keys and the engine's, for tcp alone.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            timeout_s: how long the engine may take to answer.

        Raises (at once):
            ConfigError: tcp without keys, or a default endpoint in another user's directory.
            KeyFileError: keys that cannot be used.
        Raises (on entering):
            EngineDeadError: nobody answers. ProtocolError: the engine speaks another version.
        """
        endpoint = endpoint or own_default_endpoint()
        return cls(
            endpoint=endpoint,
            engine_args=None,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            keys=client_keys(endpoint, curve_dir),
        )

    async def __aenter__(self) -> Self:
        try:
            if self._engine_args is not None:
                self._process = EngineProcess(self._engine_args)
                await self._process.wait_ready(self._timeout_s)
                self._endpoint = self._process.endpoint
            assert self._endpoint is not None
            self._connection = await EngineConnection.open(
                self._endpoint, self._timeout_s, self._keys
            )
        except BaseException:
            await self.close()
            raise
        self._files = ModelFiles(self._connection, FileCache())
        self._tokenizer = TokenizerLoader(
            self._tokenizer_folder, self._files, self.model_card.model
        )
        if self._process is not None:
            self._process_watch = asyncio.create_task(self._watch_process(self._process))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session, and the engine if it is ours. Idempotent."""
        if self._process_watch is not None:
            self._process_watch.cancel()
            await asyncio.gather(self._process_watch, return_exceptions=True)
            self._process_watch = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        if self._tokenizer is not None:
            await self._tokenizer.close()
        if self._process is not None:
            process, self._process = self._process, None
            await process.stop()

    # -- requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream a completion; each output holds everything so far and what is new.

        Args:
            prompt: text, token ids, or {"prompt_token_ids": [...]}. Ids that are an array("i") are
                sent as they are, which for long prompts is much cheaper than a list.
            request_id: a name for it, unique among this client's running requests.
            priority: lower values go first, in engines with --scheduling-policy priority; others
                refuse all but 0.
            cache_salt: share cached prefixes only with requests of the same salt.

        Raises:
            InvalidRequestError, ContextLengthError: the request cannot be served as it is.
            EngineDeadError: the engine is gone.
        """
        stream = await self._submit(prompt, sampling_params, request_id, priority, cache_salt)
        try:
            while not stream.finished:  # `async for` would cost a coroutine for each token
                output = stream.read()
                if output is not None:
                    yield output
                else:
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
    ) -> AsyncIterator[RequestOutput]:
        """Stream the assistant's answer to a conversation, by the model's chat template."""
        prompt = (await self.get_tokenizer()).encode_chat(messages)
        outputs = self.generate(prompt, sampling_params, request_id, priority, cache_salt)
        async for output in outputs:
            yield output

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The last output of a completion."""
        stream = await self._submit(prompt, sampling_params, request_id, priority, cache_salt)
        try:
            return await stream.final()
        finally:
            stream.close()

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "abort". Idempotent."""
        self._open_connection().abort([request_id])

    # -- the engine -------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where the engine listens."""
        assert self._endpoint is not None, "known once entered"
        return self._endpoint

    @property
    def model_card(self) -> ModelCard:
        """What the engine says of its model."""
        return self._open_connection().welcome.model

    @property
    def max_num_seqs(self) -> int:
        """Requests that the engine runs at once; more of them wait."""
        return self._open_connection().welcome.limits.max_num_seqs

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: of the folder that was named, or else as the engine serves it.

        Raises:
            InvalidRequestError: there is none, or its files are damaged.
            ProtocolError, EngineDeadError: the engine sends something else, or nothing.
        """
        self._open_connection()
        assert self._tokenizer is not None
        return await self._tokenizer.get()

    async def read_file(self, name: str) -> bytes:
        """A file of the model; `model_card.files` names those that the engine serves.

        Raises:
            InvalidRequestError: it serves no such file.
            ProtocolError, EngineDeadError: the engine sends something else, or nothing.
        """
        self._open_connection()
        assert self._files is not None
        return await self._files.read(name)

    async def stats(self) -> Stats:
        """The engine's counters and gauges."""
        stats = (await self._control("stats")).stats
        assert stats is not None
        return stats

    async def health(self) -> EngineHealth:
        """A sign of life, or EngineDeadError."""
        return await self._open_connection().ping(HEALTH_TIMEOUT_S)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while a request holds blocks."""
        return (await self._control("reset_prefix_cache")).ok

    async def pause(self) -> None:
        """Stop stepping. Requests are accepted and kept, and go on after `resume`."""
        await self._control("pause")

    async def resume(self) -> None:
        """Step again."""
        await self._control("resume")

    # -- inside -----------------------------------------------------------------------------------

    def _open_connection(self) -> EngineConnection:
        if self._connection is None:
            raise EngineDeadError("this client is not open: use it inside `async with`")
        return self._connection

    async def _control(self, operation: ControlOperation) -> Reply:
        return await self._open_connection().control(operation)

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> RequestStream:
        connection = self._open_connection()
        params = params or SamplingParams.from_engine(self.model_card.default_sampling)
        text, token_ids = await self._tokenize(prompt)
        submit = Submit(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=pack_int32(token_ids),
            sampling=params.for_engine(),
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = RequestStream(
            submit.request_id,
            text,
            token_ids,
            params,
            await self.get_tokenizer() if params.detokenize else None,
            leave=connection.leave,
        )
        await connection.submit(stream, submit)
        return stream

    async def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, (await self.get_tokenizer()).encode(prompt)
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        if isinstance(token_ids, (list, array)):
            return None, token_ids
        raise InvalidRequestError(
            "a prompt is a str, a list or array of token ids or {'prompt_token_ids': [...]}, not "
            f"{type(prompt).__name__}"
        )

    async def _watch_process(self, process: EngineProcess) -> None:
        """Tell everyone who waits when our engine dies, by whatever cause."""
        code = await process.wait_exit()
        error: NanocoreError = EngineDeadError(f"the engine process exited with code {code}")
        if self._connection is not None:
            self._connection.fail(error)
