"""The values that fields of messages take, and since which minor version a field exists.

Each is a JSON Schema annotation, so the schema and PROTOCOL.md's tables follow from the types.
What msgspec is to check while it decodes is a `Meta` with ge, le and the like. What is `limited` is
checked by `limits.check_limits`, which says what was wrong and what would have been right: by
admission for a request, and by the sampling parameters when they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec

MAX_REQUEST_ID_CHARS: Final = 256
MAX_CACHE_SALT_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_NUM_SAMPLES: Final = 128
MAX_LOGIT_BIASES: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORDS_TOKENS: Final = 1024
MAX_STRUCTURED_OUTPUTS_BYTES: Final = 136 * 2**10
MAX_CHOICES: Final = 4096
MAX_STRUCTURES: Final = 128
MAX_FREE_PREFIXES: Final = 256
MAX_LENIENT_PARTS: Final = 1024
MAX_EXACT_INT: Final = 2**53 - 1
"""The largest integer that every language's numbers hold exactly."""
MAX_INT32: Final = 2**31 - 1


def limited(remedy: str = "", **schema: object) -> msgspec.Meta:
    """The limits of a field as JSON Schema keywords.

    remedy: what else an error says.
    """
    return msgspec.Meta(extra_json_schema=schema, extra={"remedy": remedy})


def since(minor: int) -> msgspec.Meta:
    """A field that came with protocol 1.minor; the others have been there since 1.0."""
    return msgspec.Meta(extra_json_schema={"since": f"1.{minor}"})


@cache
def minor_versions(struct: type[msgspec.Struct]) -> dict[str, int]:
    """The minor versions that brought a struct's fields, without those that are as old as it."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: minor for name, hint in hints.items() for minor in _minor_versions(hint)}


def _minor_versions(hint: Any) -> Iterator[int]:
    for part in get_args(hint):
        if isinstance(part, msgspec.Meta) and "since" in (part.extra_json_schema or {}):
            yield int((part.extra_json_schema or {})["since"].removeprefix("1."))
        else:
            yield from _minor_versions(part)


ExactInt = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXACT_INT)]
Handle = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
RequestId = Annotated[str, limited(minLength=1, maxLength=MAX_REQUEST_ID_CHARS)]
CacheSalt = Annotated[str, limited(minLength=1, maxLength=MAX_CACHE_SALT_CHARS)]
Seed = Annotated[int, limited(minimum=0, maximum=MAX_EXACT_INT)]
Int32Column = Annotated[bytes, limited(column="int32")]
Uint32Column = Annotated[bytes, limited(column="uint32")]
Float32Column = Annotated[bytes, limited(column="float32")]
