"""What `format` asks of a text, checked by means that have nothing to do with the grammars'.

jsonschema checks some formats itself; these are those that it leaves to other packages, or takes
too lightly (an email needs no more than an "@" there), or too strictly: Python's dates have no year
0, RFC 3339's have. As grammars do, it takes 29 February in any year, and a leap second in any hour.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from jsonschema import FormatChecker

FORMATS: Final = FormatChecker(formats=["ipv4", "ipv6", "uuid"])
DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DURATION: Final = re.compile(
    r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", re.ASCII
)
IN_URI: Final = re.compile(r"(%[0-9A-Fa-f]{2}|[A-Za-z0-9:/?#\[\]@!$&'()*+,;=._~-])*")


@FORMATS.checks("date")
def is_date(value: object) -> bool:
    if not isinstance(value, str):
        return True
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
        return False
    month, day = int(value[5:7]), int(value[8:])
    return 1 <= month <= 12 and 1 <= day <= DAYS[month - 1]


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    parts = re.fullmatch(
        r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[zZ]|[+-](\d\d):(\d\d))", value, re.ASCII
    )
    if parts is None:
        return False
    hour, minute, second, off_hour, off_minute = (int(part or 0) for part in parts.groups())
    return max(hour, off_hour) <= 23 and max(minute, off_minute) <= 59 and second <= 60


@FORMATS.checks("date-time")
def is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return value[10:11] in ("T", "t") and is_date(value[:10]) and is_time(value[11:])


@FORMATS.checks("duration")
def is_duration(value: object) -> bool:
    return not isinstance(value, str) or DURATION.fullmatch(value) is not None


@FORMATS.checks("hostname")
def is_hostname(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return len(value) <= 253 and all(LABEL.fullmatch(label) for label in value.split("."))


@FORMATS.checks("email")
def is_email(value: object) -> bool:
    """A local part of visible characters, and a host's name or an address in brackets."""
    if not isinstance(value, str):
        return True
    local, _, domain = value.rpartition("@")
    local_is_good = re.fullmatch(r"[\x21-\x7e]+", local) is not None
    return local_is_good and (is_hostname(domain) or re.fullmatch(r"\[.+\]", domain) is not None)


@FORMATS.checks("uri", raises=ValueError)
def is_uri(value: object) -> bool:
    if not isinstance(value, str):
        return True
    is_absolute = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) is not None
    urlsplit(value)
    return is_absolute and IN_URI.fullmatch(value) is not None
