"""Exchange: one HTTP request and its response, as endpoints see them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qs

import msgspec

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.http.http_errors import (
    RETRY_LATER_S,
    HttpError,
    bad_request,
    http_error,
    openai_body,
    unavailable,
)
from nanocore.http.request_record import RequestRecord
from nanocore.http.state import ServerState
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.fields import field_error, json_kind

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]
Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")
JSON: Final = b"application/json"
CURLS: Final = "application/x-www-form-urlencoded"
_UNSAFE: Final = re.compile(r"[^\x20-\x7e]")
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])")
"""A lone surrogate; the decoder's own message calls the body truncated."""
CHUNK_WRITER: Final = "nanocore.chunk_writer"
"""Key in the ASGI scope's extensions."""
_ELSEWHERE: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar, in Lark's syntax,",
    "grammar": "structured_outputs.grammar, in Lark's syntax,",
    "json_schema": "structured_outputs.json",
    "format": "structured_outputs.json, or structured_outputs.json_object=true,",
    "options": "not an object: max_tokens, temperature and the others are fields of the request",
}
"""Fields of older vLLM, llama.cpp and Ollama without which the answer would be another; by name,
what they are here."""
MAX_FIELDS: Final = 256
MAX_IGNORED: Final = 32
MAX_ITEMS: Final = 1 << 16
"""Limit for strings, and for lists and objects, in a body."""
MAX_COMMAS: Final = 1 << 20
"""Limit for values in a body, found by its commas: a prompt of token ids may have that many."""


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


class Exchange:
    """One request, its response, and notes for spans and headers.

    state: the server's. path_id: text in place of {id} in the path. reply_headers: sent with any
    response. num_body_bytes: read so far. error_body: encoder of errors for this client.
    field_names: the dialect's names for fields of a chat request, for error messages. record: for
    the request's span.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, state: ServerState, request_id: str
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.state = state
        self.settings = state.settings
        self.request_id = request_id
        self.path_id = ""
        self.reply_headers: dict[bytes, bytes] = {}
        self.has_started = False
        self.num_body_bytes = 0
        self.record = RequestRecord(request_id)
        self.error_body: Callable[[HttpError], bytes] = openai_body
        self.field_names: Mapping[str, str] = {}
        self._ignored: set[str] = set()

    @property
    def client(self) -> AsyncEngineClient:
        """The engine client.

        Raises:
            HttpError: it is not connected yet.
        """
        if self.state.client is None:
            raise unavailable("the model is being loaded", RETRY_LATER_S)
        return self.state.client

    @property
    def chunk_writer(self) -> Callable[[bytes], bool] | None:
        """Function that writes a chunk without a coroutine, if the server offers one.

        For chunks that are neither the first nor the last of a response. It returns False and
        writes nothing if `send` must be used.
        """
        writer: Callable[[bytes], bool] | None = self.scope.get("extensions", {}).get(CHUNK_WRITER)
        return writer

    @property
    def given_request_id(self) -> str | None:
        """The client's x-request-id, if it sent a valid one."""
        is_given = self.header(b"x-request-id") == self.request_id.encode()
        return self.request_id if is_given else None

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        names = self.settings.served_model_names
        return names[0] if names else self.client.model_card.model

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the response: the requested one, if it is served.

        A model that is served by its path goes by the last part of it, too.

        Raises:
            HttpError: another model is requested.
        """
        self.record.request_model = name or None
        served = self.settings.served_model_names or (self.client.model_card.model,)
        is_path = not self.settings.served_model_names and os.path.isabs(served[0])
        if name and name not in served and not (is_path and name == os.path.basename(served[0])):
            raise HttpError(
                404,
                f"the model {name!r} does not exist: this server has {', '.join(served)}",
                "model_not_found",
                "model",
            )
        self.record.response_model = name or served[0]
        return self.record.response_model

    def header(self, name: bytes) -> bytes | None:
        """Return a header's first value. name: in lower case."""
        return next(iter(self.headers(name)), None)

    def headers(self, name: bytes) -> list[bytes]:
        """Return all values of a header. name: in lower case."""
        return [value for known, value in self.scope["headers"] if known == name]

    def query(self) -> dict[str, str]:
        given = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        return {name: values[-1] for name, values in given.items()}

    # -- notes for spans and headers ---------------------------------------------------------------

    def note_params(self, params: SamplingParams, is_stream: bool | None) -> None:
        self.record.params = params
        self.record.is_stream = bool(is_stream)

    def note_error(self, error: HttpError) -> None:
        self.record.error = error.code or str(error.status)

    def note_ignored(self, names: Collection[str]) -> None:
        """List parts of the request that have no effect in the header nanocore-ignored."""
        self._ignored.update(map(self._renamed, names))
        if self._ignored:
            text = ", ".join(sorted(self._ignored)[:MAX_IGNORED])
            self.reply_headers[b"nanocore-ignored"] = _UNSAFE.sub("?", text).encode()[:1024]

    def http_error(self, error: NanocoreError) -> HttpError:
        """Return the response for an error, with fields named as in the request's dialect."""
        found = http_error(error)
        found.message = self._renamed(found.message)
        found.param = found.param and self._renamed(found.param)
        return found

    def _renamed(self, text: str) -> str:
        for name, own in self.field_names.items():
            # Whole names only: `max_tokens` is not a part of another.
            pattern = rf"(?<!\w){name}(?!\w)" if name.isidentifier() else re.escape(name)
            text = re.sub(pattern, own, text)
        return text

    # -- the request's body ------------------------------------------------------------------------

    async def read(self, kind: type[Body]) -> Body:
        """Read the body as this struct; unknown fields are noted as ignored.

        Raises:
            HttpError: it is invalid or too large.
            Disconnected: the client has gone.
        """
        fields = await self.read_object()
        if len(fields) > MAX_FIELDS:
            raise bad_request(f"the body has {len(fields)} fields: at most {MAX_FIELDS} are read")
        # Unknown fields are not errors: newer SDKs send more of them.
        unknown = fields.keys() - set(kind.__struct_encode_fields__)
        if "structured_outputs" in kind.__struct_encode_fields__:
            for name in sorted(unknown & _ELSEWHERE.keys()):
                if fields[name] is not None:
                    raise bad_request(f"{name} is {_ELSEWHERE[name]} here", name)
        self.note_ignored(unknown)
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            path, problem = field_error(error, fields, kind)
            raise bad_request(problem, path) from None
        except RecursionError:
            raise bad_request("the request is nested too deep") from None

    async def read_object(self) -> dict[str, Any]:
        """Read the body as a JSON object; raises as `read`."""
        kind = self.header(b"content-type")
        if kind is not None and kind.split(b";")[0].strip().lower() != JSON:
            shown = kind.decode("latin-1")
            curl = " (curl: -H 'content-type: application/json')" * (shown == CURLS)
            raise HttpError(
                415, f"the content type {shown!r} is not supported: send application/json{curl}"
            )
        body = await self.read_body()
        check_body_limits(body)
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            half = _HALF_PAIR.search(body)
            what = f"{half[0].decode()} is half a surrogate pair" if half else str(error)
            what = what.partition(" - at `")[0]  # which names no field where a number is too large
            raise bad_request(f"the body cannot be read as JSON: {what}") from None
        except RecursionError:
            raise bad_request("the request is nested too deep") from None
        if not isinstance(fields, dict):
            raise bad_request(f"the body must be a JSON object, not {json_kind(fields)}")
        return fields

    async def read_body(self) -> bytes:
        """Read the whole body; raises as `read`."""
        limit = self.settings.max_body_bytes
        too_large = HttpError(
            413, f"the body has more than {limit} bytes: send less, or raise --max-body-bytes"
        )
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_large
        if (encoding := self.header(b"content-encoding")) not in (None, b"identity"):
            shown = (encoding or b"").decode("latin-1")
            raise HttpError(
                415, f"the content encoding {shown!r} is not supported: send it uncompressed"
            )
        body = bytearray()
        while True:  # HttpConnection has the deadline
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            self.num_body_bytes = len(body)
            if len(body) > limit:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    # -- the response ------------------------------------------------------------------------------

    async def reply_json(self, value: object) -> None:
        await self.reply(200, msgspec.json.encode(value))

    async def reply(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await self.send(self.start(status, content_type, headers))
        await self.send({"type": "http.response.body", "body": body})

    def start(
        self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]
    ) -> dict[str, Any]:
        self.has_started = True
        self.record.status = status
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), *headers, *self.reply_headers.items()],
        }

    # -- work that ends with the client ------------------------------------------------------------

    async def attended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what this work returns, or cancel it when the client disconnects.

        Generation has a `Delivery` instead. The body must have been read before.

        Raises:
            Disconnected: the client has gone. Errors of the work are raised as they are.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self.disconnected())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Disconnected
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def disconnected(self) -> None:
        """Wait until the client disconnects; further parts of a body are dropped."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


def check_body_limits(body: bytes) -> None:
    """Check the number of values in a JSON body before it is decoded.

    The decoder holds the interpreter's lock, and dialects walk its result in the event loop. A body
    within its limit of bytes could hold millions of lists, and stall all requests for seconds. The
    count runs in C, and leaves out what is inside strings; the body need not be valid.

    Raises:
        HttpError: a limit is exceeded.
    """
    if len(body) <= MAX_ITEMS or all(num <= most for num, most, _ in _counts(body)):
        return  # nearly always sufficient, although it also counts characters inside strings
    # Without escapes each remaining quote begins or ends a string, so every second piece is text.
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if body.count(b'"') <= 2 * MAX_ITEMS:
        body = b'""'.join(body.split(b'"')[::2])
    for number, most, name in _counts(body):
        if number > most:
            raise HttpError(
                413, f"the body has {number} {name}: at most {most} are read; send several requests"
            )


def _counts(body: bytes) -> list[tuple[int, int, str]]:
    """Return number, limit and name of each kind of value, strings' contents included."""
    return [
        (body.count(b'"') // 2, MAX_ITEMS, "strings, keys of objects among them"),
        (body.count(b"[") + body.count(b"{"), MAX_ITEMS, "lists and objects"),
        (body.count(b","), MAX_COMMAS, "commas outside of strings"),
    ]
