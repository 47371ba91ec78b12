"""A message as annotated bytes, the way PROTOCOL.md's examples show it.

Each line holds some bytes and what they mean. The bytes of all lines, put together, are the message
as the codec writes it; a map's fields stand on lines of their own, the key in front of its value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Message, TokenLogprobs
from tests.protocol_files.tables import columns_of

Line = tuple[str, str]
"""(bytes as hex, what they mean)."""
BYTES_PER_LINE = 48
LONG_HEADERS = {"sampling"}
"""Maps whose struct has more than 15 fields: msgspec writes its header for so many, always."""
encode_value = msgspec.msgpack.encode


def hex_dump(message: Message) -> str:
    """The lines of a fenced block, without the fence."""
    op, body = encode(message)
    fields = msgspec.msgpack.decode(body)
    columns = columns_of(TokenLogprobs) | columns_of(type(message))
    lines: list[Line] = list(_map_lines(fields, columns, ""))
    written = "".join(code for code, _ in lines).replace(" ", "")
    assert written == body.hex(), "these are the bytes that are sent"
    lines = [line for code, text in lines for line in _wrap(code, text)]
    width = max(len(code) for code, _ in lines)
    rows = [f"frame 1 │ {op.hex():{width}} │ {message.op.name}"]
    margins = ["frame 2", *[" " * 7] * (len(lines) - 1)]
    rows += [
        f"{margin} │ {code:{width}} │ {text}".rstrip()
        for margin, (code, text) in zip(margins, lines, strict=True)
    ]
    return "\n".join(rows)


def _map_lines(
    fields: dict[str, Any], columns: dict[str, str], indent: str, header: str = ""
) -> Iterator[Line]:
    yield header or _header(fields), f"{indent}map of {len(fields)}"
    for key, value in fields.items():
        name, inner = _spaced(encode_value(key)), f"{indent}  {key}: "
        if isinstance(value, dict):
            header = f"de {len(value):04x}" if key in LONG_HEADERS else ""
            (code, text), *rest = _map_lines(value, columns, indent + "  ", header)
            yield f"{name}  {code}", f"{inner}{text.strip()}"
            yield from rest
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{name}  {_header(value)}", f"{inner}array of {len(value)}"
            for item in value:
                yield from _map_lines(item, columns, indent + "    ")
        else:
            yield f"{name}  {_spaced(encode_value(value))}", inner + _text(value, columns.get(key))


def _header(container: dict[str, Any] | list[Any]) -> str:
    """The byte that opens a map or an array of at most 15."""
    assert len(container) < 16, "longer ones have other headers"
    return f"{(0x80 if isinstance(container, dict) else 0x90) | len(container):02x}"


def _spaced(encoded: bytes) -> str:
    """Hex of a value, with a space behind the header of a str or bin and between a bin's int32s."""
    first = encoded[0]
    if first in (0xC4, 0xD9):
        header = 2
    elif 0xA0 <= first <= 0xBF or 0x90 <= first <= 0x9F:
        header = 1
    else:
        return encoded.hex()
    content = encoded[header:].hex(" ", 4) if first == 0xC4 else encoded[header:].hex()
    return f"{encoded[:header].hex(' ')} {content}".rstrip()


def _text(value: object, column: str | None) -> str:
    if isinstance(value, bytes):
        if column is None:
            return f"bin of {len(value)}: {value!r}"
        kind = {"int32": "i", "uint32": "I", "float32": "f"}[column]
        numbers = struct.unpack(f"<{len(value) // 4}{kind}", value)
        return f"{column} " + " ".join(
            f"{number:g}" if kind == "f" else str(number) for number in numbers
        )
    return msgspec.json.encode(value).decode().replace(",", ", ")


def _wrap(code: str, text: str) -> Iterator[Line]:
    """A long line as several; what they mean stands on the first."""
    width = 2 * BYTES_PER_LINE
    while len(code) > width:
        cut = code.rfind(" ", 0, width + 1)
        cut = width if cut <= 0 else cut
        yield code[:cut].rstrip(), text
        code, text = code[cut:].lstrip(), ""
    yield code, text
