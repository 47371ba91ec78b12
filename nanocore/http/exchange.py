"""One request and its answer, as endpoints see them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qs

import msgspec

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.http.body_bounds import check_bounds
from nanocore.http.errors import (
    RETRY_LATER_S,
    HttpError,
    bad_request,
    http_error,
    openai_body,
    unavailable,
)
from nanocore.http.request_record import DISCONNECTED, RequestRecord
from nanocore.http.state import ServerState
from nanocore.protocol.errors import NanocoreError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]
Body = TypeVar("Body", bound=msgspec.Struct)
JSON: Final = b"application/json"
_UNSAFE: Final = re.compile(r"[^\x20-\x7e]")
_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])")
"""What the decoder calls truncated."""
CHUNK_WRITER: Final = "nanocore.chunk_writer"
"""Of a scope's extensions."""
MAX_FIELDS: Final = 256
MAX_IGNORED: Final = 32
"""Names of things without effect that an answer lists."""


class Disconnected(Exception):
    """The client has gone before its request was here."""


class Exchange:
    """Made for each request by the app.

    state: the server's. path_id: what the path has in the place of an id. reply_headers: of the
    answer, whatever it will be. num_body_bytes: read so far. error_body: what an error looks like
    to this client. field_names: its dialect's for those of a chat's, where they differ. record: of
    what is told at the end, if anybody is told.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        state: ServerState,
        request_id: str,
    ) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.state = state
        self.settings = state.settings
        self.request_id = request_id
        self.path_id = ""
        self.reply_headers: dict[bytes, bytes] = {}
        self.has_started = False
        self.num_body_bytes = 0
        self.record: RequestRecord | None = None
        self.error_body: Callable[[HttpError], bytes] = openai_body
        self.field_names: Mapping[str, str] = {}
        self._ignored: set[str] = set()

    @property
    def client(self) -> AsyncEngineClient:
        """The engine's.

        Raises:
            HttpError: it does not serve yet.
        """
        if self.state.client is None:
            raise unavailable("the model is being loaded", RETRY_LATER_S)
        return self.state.client

    @property
    def chunk_writer(self) -> Callable[[bytes], bool] | None:
        """A shorter way than `send` for what is neither the first nor the last of an answer.

        It writes a chunk and says True, or says False, and has done nothing.
        """
        writer: Callable[[bytes], bool] | None = self.scope.get("extensions", {}).get(CHUNK_WRITER)
        return writer

    @property
    def model_name(self) -> str:
        """What the model is called in answers."""
        names = self.settings.served_model_names
        return names[0] if names else self.client.model_card.model

    def check_model(self, name: str | None) -> str:
        """The model's name as the client wants it in its answer.

        Raises:
            HttpError: another model is asked for.
        """
        if self.record is not None:
            self.record.request_model = name or None
        model = self._served_model(name)
        if self.record is not None:
            self.record.response_model = model
        return model

    def _served_model(self, name: str | None) -> str:
        served = self.settings.served_model_names or (self.client.model_card.model,)
        if name is None or name == "":
            return served[0]
        if name not in served:
            raise HttpError(
                404,
                f"the model {name!r} does not exist: this server has {', '.join(served)}",
                "model_not_found",
                "model",
            )
        return name

    def header(self, name: bytes) -> bytes | None:
        """A header's value; name: in lower case."""
        for known, value in self.scope["headers"]:
            if known == name:
                found: bytes = value
                return found
        return None

    def headers(self, name: bytes) -> list[bytes]:
        """All values of a header that may be there more than once; name: in lower case."""
        return [value for known, value in self.scope["headers"] if known == name]

    def query(self) -> dict[str, str]:
        """The URL's parameters, of each name the last value."""
        given = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        return {name: values[-1] for name, values in given.items()}

    def note_params(self, params: SamplingParams, is_stream: bool | None) -> None:
        """What the request asks for, once that is known."""
        if self.record is not None:
            self.record.params, self.record.is_stream = params, bool(is_stream)

    def note_error(self, error: HttpError) -> None:
        """The answer is this error, or ends with it."""
        if self.record is not None:
            self.record.error = error.code or str(error.status)

    def http_error(self, error: NanocoreError) -> HttpError:
        """The answer to a request that fails so, with fields as its dialect names them."""
        found = http_error(error)
        found.message = self._renamed(found.message)
        found.param = found.param and self._renamed(found.param)
        return found

    def _renamed(self, text: str) -> str:
        for name, own in self.field_names.items():
            text = text.replace(name, own)
        return text

    def note_disconnect(self) -> None:
        """The client has left before its answer was complete."""
        if self.record is not None:
            self.record.error = DISCONNECTED

    # -- in ---------------------------------------------------------------------------------------

    async def read(self, kind: type[Body]) -> Body:
        """The body as this struct; fields that it does not have are named in a header.

        Raises:
            HttpError: it is no such thing, too large, or does not come.
            Disconnected: the client has gone.
        """
        fields = await self.read_object()
        if len(fields) > MAX_FIELDS:
            raise bad_request(f"the body has {len(fields)} fields: at most {MAX_FIELDS} are read")
        self.note_ignored(fields.keys() - set(kind.__struct_encode_fields__))
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            where = _PATH.search(str(error))
            raise bad_request(str(error), where and where[1]) from None
        except RecursionError:
            raise bad_request("the request is nested too deep") from None

    def note_ignored(self, names: Collection[str]) -> None:
        """Name, in the answer's header, what of the request has no effect."""
        self._ignored.update(map(self._renamed, names))
        if self._ignored:
            text = ", ".join(sorted(self._ignored)[:MAX_IGNORED])
            self.reply_headers[b"nanocore-ignored"] = _UNSAFE.sub("?", text).encode()[:1024]

    async def read_object(self) -> dict[str, Any]:
        """The body's JSON object; raises likewise."""
        kind = self.header(b"content-type")
        if kind is not None and kind.split(b";")[0].strip().lower() != JSON:
            raise HttpError(
                415,
                f"the content type {kind.decode('latin-1')!r} is not served: send application/json",
            )
        body = await self.read_body()
        check_bounds(body)
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            half = _HALF_PAIR.search(body)
            what = f"{half[0].decode()} is half a surrogate pair" if half else str(error)
            raise bad_request(f"the body cannot be read as JSON: {what}") from None
        except RecursionError:
            raise bad_request("the request is nested too deep") from None
        if not isinstance(fields, dict):
            raise bad_request(f"the body is a JSON object, not {type(fields).__name__}")
        return fields

    async def read_body(self) -> bytes:
        """All of it; raises likewise."""
        limit = self.settings.max_body_bytes
        too_large = HttpError(
            413,
            f"the body has more than {limit} bytes: send less, or raise --max-body-bytes",
        )
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_large
        if (encoding := self.header(b"content-encoding")) not in (None, b"identity"):
            shown = (encoding or b"").decode("latin-1")
            raise HttpError(415, f"the content encoding {shown!r} is not served: send it plain")
        body = bytearray()
        while True:  # the connection says for how long
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            self.num_body_bytes = len(body)
            if len(body) > limit:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    # -- out --------------------------------------------------------------------------------------

    async def reply_json(self, value: object, status: int = 200) -> None:
        """Answer with a value as JSON."""
        await self.reply(status, msgspec.json.encode(value))

    async def reply(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """Answer, once and whole."""
        headers = [(b"content-length", b"%d" % len(body))]
        await self.send(self.start(status, content_type, headers))
        await self.send({"type": "http.response.body", "body": body})

    def start(
        self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]
    ) -> dict[str, Any]:
        """The message that begins an answer."""
        self.has_started = True
        if self.record is not None:
            self.record.status = status
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), *headers, *self.reply_headers.items()],
        }
