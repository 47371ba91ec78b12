"""The table of sampling parameters in docs/client.md, out of the types.

Defaults, ranges and versions are those of the fields, what a parameter means stands in the
docstrings of its classes; only where it acts is said here.
"""

from __future__ import annotations

import re

import msgspec

from nanocore.protocol.fields import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STRUCTURED_OUTPUTS_BYTES,
)
from nanocore.protocol.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    CommonSamplingParams,
    EngineSamplingParams,
    SamplingParams,
)
from tests.protocol_files.tables import keywords, range_of, schema_of

MARK = re.compile(r"<!-- sampling parameters -->\n(?:\|[^\n]*\n)*")
HEAD = "| parameter | default | range | acts in | protocol | meaning |\n|---|---|---|---|---|---|\n"
_DESCRIBED = re.compile(
    r"^    (\w+(?:, \w+)*): (.*(?:\n    (?!\w+(?:, \w+)*: )\S.*)*)", re.MULTILINE
)
ACTS_IN = {
    **dict.fromkeys(("n", "skip_reading_prefix_cache"), "admission"),
    **dict.fromkeys(
        ("max_tokens", "stop_token_ids", "ignore_eos", "repetition_detection"), "after a step"
    ),
    "bad_words": "client, step",
    "structured_outputs": "admission, step",
    "pooling": "admission, step",
    **dict.fromkeys(("stop", "include_stop_str_in_output"), "client"),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), "client"),
}
"""Who obeys a parameter: the client, the engine as it admits a request, or, by default, a step."""
_TEXTS = f"texts of 1 to {MAX_STOP_STRING_CHARS} characters"
_RANGES = {
    "logit_bias": f"at most {MAX_LOGIT_BIASES}, each {-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}",
    "bad_words": f"at most {MAX_BAD_WORDS // 2} {_TEXTS}",
    "structured_outputs": f"one kind, at most {MAX_STRUCTURED_OUTPUTS_BYTES // 2**10} KiB",
    "stop": f"at most {MAX_STOP_STRINGS} {_TEXTS}",
}
"""Of parameters that are checked by more than their annotations."""
_ENGINES_NAMES = {"bad_words": "bad_words_token_ids"}


def meanings() -> dict[str, str]:
    """What the docstrings say, by parameter."""
    found = {}
    for struct in (CommonSamplingParams, SamplingParams):
        for names, text in _DESCRIBED.findall(struct.__doc__ or ""):
            for name in names.split(", "):
                found[name] = " ".join(text.split()).removesuffix(".").replace("|", "\\|")
    return found


def parameter_rows() -> list[list[str]]:
    """[parameter, default, range, acts in, protocol, meaning] of each, the engine's first."""
    properties = schema_of(EngineSamplingParams)["properties"]
    described = meanings()
    rows = []
    for field in msgspec.structs.fields(SamplingParams):
        schema = properties.get(_ENGINES_NAMES.get(field.name, field.name))
        since = "any" if schema is None else keywords(schema).get("since", "1.0")
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()  # type: ignore[operator]
        rows.append(
            [
                f"`{field.name}`",
                repr(default),
                _RANGES.get(field.name) or range_of(schema or {}),
                ACTS_IN.get(field.name, "step"),
                since,
                described[field.name],
            ]
        )
    return rows


def with_parameters(document: str) -> str:
    """The document with the marked table written anew."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in parameter_rows())
    return MARK.sub(lambda _: f"<!-- sampling parameters -->\n{HEAD}{rows}", document)
