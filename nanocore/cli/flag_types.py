"""What the values of flags are read as; each kind says what is wrong with a value."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

DEFAULT_NAMESPACE: Final = "nanocore"


def at_least(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        limits = f"from {least} on" if most == 10**18 else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number {limits}")

    return number


def metrics_namespace(text: str) -> str:
    """What names of metrics may begin with."""
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no name of letters, digits and _")


def port(text: str) -> int:
    """Of TCP; 0 is any."""
    if text.isascii() and text.isdigit() and int(text[:6]) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")


def seconds(text: str) -> float:
    """Above 0."""
    number = seconds_or_none(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number


def seconds_or_none(text: str) -> float:
    """0 too."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 <= number < 1e8:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def otlp_url(text: str) -> str:
    """Of an OTLP collector; one without a path gets that of traces."""
    parts = http_url(text, "http://HOST:4318/v1/traces")
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/v1/traces"


def api_url(text: str) -> str:
    """Of OpenAI's API; one without a path gets /v1."""
    parts = http_url(text, "http://HOST:8000/v1", has_query=False)
    return text.rstrip("/") if parts.path.strip("/") else f"{text.rstrip('/')}/v1"


def http_url(text: str, example: str, has_query: bool = True) -> SplitResult:
    """Its parts. has_query: whether it may have a query or a fragment."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if is_good and (has_query or not (parts.query or parts.fragment)):
        return parts
    shown = re.sub("//.*@", "//***@", text)  # there may be a password
    raise argparse.ArgumentTypeError(f"{shown!r} is no URL such as {example}")


def json_object(text: str) -> dict[str, Any]:
    """An object as JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
