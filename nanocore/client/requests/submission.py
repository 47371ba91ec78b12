"""Submission: a caller's request is checked, tokenized and sent, in the order of the calls.

Checked here is only what the engine cannot check: fields that are newer than it, capabilities that
it lacks, and text that cannot be tokenized.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Self, TypeAlias, TypedDict

from msgspec.structs import replace

from nanocore.client.arguments import check_request_id, check_sampling_params
from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.connection.client_session import ClientSession
from nanocore.client.connection.request_table import OpenRequest
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import minor_versions
from nanocore.protocol.messages import Capability, Submit
from nanocore.protocol.sampling import EngineSamplingParams, SamplingParams


class SubmitTicket:
    """Place of one request in the order of submission, which is the order of the calls.

    A request may wait for a session, the tokenizer or a template; later ones wait for it. Requests
    with long texts give way, so that they delay no others. Leaving the ticket's `with` block lets
    the next request submit. Belongs to one event loop.

    tickets: the client's, in order; the new one takes the last place. It is the first one's turn.
    """

    def __init__(self, tickets: dict[SubmitTicket, None]) -> None:
        self._tickets = tickets
        self._turn = asyncio.Event()
        tickets[self] = None

    async def turn(self) -> None:
        """Wait until all earlier requests are submitted, have failed, or gave way."""
        if self in self._tickets and next(iter(self._tickets)) is not self:
            await self._turn.wait()

    def give_way(self) -> None:
        """Leave the queue, so that later requests need not wait. Idempotent."""
        self._tickets.pop(self, None)
        for first in self._tickets:
            first._turn.set()
            break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_way()


async def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return the token sequences of these words: one or two for each.

    The second is the word after a space, unless it ends with the first, which forbids it already.
    vLLM forbids it only if both have equally many tokens: then " apple" (one token) is allowed
    although "apple" (three) is bad.

    Raises:
        InvalidRequestError: a word has no tokens.
    """
    sequences = []
    for word in words:
        bare = word.lstrip()
        first, second = (
            tokenizer.encode(space + bare, add_special_tokens=False) for space in ("", " ")
        )
        if not first:
            raise InvalidRequestError(f"bad_words has {word!r}, which has no tokens: leave it out")
        sequences.append(first)
        if second[-len(first) :] != first:
            sequences.append(second)
        await asyncio.sleep(0)  # other tasks run between words
    return sequences


class TokensPrompt(TypedDict):
    """A tokenized prompt."""

    prompt_token_ids: list[int] | array[int]


class RequestOptions(NamedTuple):
    """Options of one request, as in `AsyncEngineClient.generate`.

    request_id: None generates one. fit_max_tokens: limit max_tokens to the remaining context.
    """

    request_id: str | None
    priority: int
    cache_salt: str | None
    timeout_s: float | None = None
    fit_max_tokens: bool = False


_DEFAULTS: Final = EngineSamplingParams()
LENIENT_SINCE: Final = 12
"""Minor version of the protocol that brought lenient schemas."""
_EMBEDDINGS: Final[Capability] = "embeddings"
Prompt: TypeAlias = "str | list[int] | array[int] | TokensPrompt"


async def submit(
    session: ClientSession,
    prompt: Prompt,
    params: SamplingParams | None,
    options: RequestOptions,
    ticket: SubmitTicket,
) -> RequestStream:
    """Send a request; the stream gets its output or error.

    Raises:
        InvalidRequestError: it cannot be sent. ContextLengthError: its text is far too long.
        EngineDeadError: the engine is gone.
    """
    connection = session.connection
    welcome = connection.welcome
    if params is None:
        params = SamplingParams.from_engine(welcome.model.default_sampling)
    request_id = uuid.uuid4().hex if options.request_id is None else options.request_id
    timeout_s = options.timeout_s
    check_sampling_params(params)
    check_request_id(request_id, welcome.limits.max_request_id_chars)
    text, token_ids = await _tokenize(session, prompt, ticket)
    if options.fit_max_tokens:
        params = _fitted(params, welcome.model.max_model_len - len(token_ids))
    words: list[list[int]] = []
    if params.bad_words:
        words = await bad_words_token_ids(await session.tokenizer.get(), params.bad_words)
    sampling = _as_known(params.for_engine(words), welcome.protocol[1])
    _check_version(sampling, welcome.protocol, timeout_s)
    if sampling.pooling is not None and _EMBEDDINGS not in welcome.capabilities:
        raise InvalidRequestError("this engine does not compute embeddings: use another one")
    packed_ids = pack_int32(token_ids)  # before the detokenizer gets them, because it checks them
    stream = RequestStream(
        request_id,
        text,
        token_ids,
        params,
        await session.tokenizer.get() if params.detokenize else None,
        leave=session.leave,
    )
    stream.message = message = Submit(
        request_id=request_id,
        prompt_token_ids=packed_ids,
        sampling=sampling,
        priority=options.priority,
        cache_salt=options.cache_salt,
        timeout_s=timeout_s,
    )
    if timeout_s is not None:
        stream.deadline_s = time.monotonic() + timeout_s
    await ticket.turn()
    await connection.submit(OpenRequest(stream), message)
    return stream


def _as_known(sampling: EngineSamplingParams, minor: int) -> EngineSamplingParams:
    # Older engines do not know lenient schemas: they refuse what they cannot enforce.
    wanted = sampling.structured_outputs
    if wanted is not None and wanted.lenient and minor < LENIENT_SINCE:
        return replace(sampling, structured_outputs=replace(wanted, lenient=[]))
    return sampling


def _fitted(params: SamplingParams, room: int) -> SamplingParams:
    # A full prompt leaves one token; the engine refuses longer prompts with the reason.
    if params.max_tokens is None or params.max_tokens <= room or room < 0:
        return params
    return replace(params, max_tokens=max(room, 1))


async def _tokenize(
    session: ClientSession, prompt: Prompt, ticket: SubmitTicket
) -> tuple[str | None, Sequence[int]]:
    if isinstance(prompt, str):
        if len(prompt) > LONG_CHARS:
            ticket.give_way()
        max_tokens = session.connection.welcome.model.max_model_len
        return prompt, await session.tokenizer.encode(prompt, max_tokens=max_tokens)
    return None, given_token_ids(prompt)


def given_token_ids(prompt: list[int] | array[int] | TokensPrompt) -> list[int] | array[int]:
    """Return the token ids of a prompt that is not text; raises InvalidRequestError."""
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    if isinstance(token_ids, (list, array)):
        return token_ids
    raise InvalidRequestError(
        "a prompt is a str, a list or array of token ids or {'prompt_token_ids': [...]}, not "
        f"{type(prompt).__name__}"
    )


def _check_version(
    sampling: EngineSamplingParams, protocol: tuple[int, int], timeout_s: float | None
) -> None:
    """Refuse fields that are newer than the session's protocol; defaults are not sent at all."""
    major, spoken = protocol
    newer = [
        ("bad_words" if name == "bad_words_token_ids" else name, minor)
        for name, minor in minor_versions(EngineSamplingParams).items()
        if minor > spoken and getattr(sampling, name) != getattr(_DEFAULTS, name)
    ]
    wanted = sampling.structured_outputs
    if wanted is not None and wanted.reasoning is not None and spoken < 7:
        newer.append(("structured_outputs.reasoning", 7))
    if timeout_s is not None and spoken < 9:
        newer.append(("timeout_s", 9))
    if newer:
        name, minor = newer[0]
        raise InvalidRequestError(
            f"{name} came with protocol {major}.{minor}, and this engine speaks {major}.{spoken}: "
            "leave it out, or use a newer engine"
        )
