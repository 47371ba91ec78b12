"""What formats read of `quantization_config` alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.settings import MAX_SIZE, Range, Settings
from nanocore.worker.loading.formats.cuts import MIN_GROUP
from nanocore.worker.loading.formats.patterns import MAX_PATTERNS

T = TypeVar("T", int, str, bool)


def group_size(settings: Settings, name: str = "group_size") -> int:
    """Inputs that share a scale, -1 for all; required.

    Raises:
        ModelFileError: no group has such a size.
    """
    size = settings.get(name, int, 0)
    if size == -1:
        return size
    if not settings.has(name):
        raise ModelFileError(f"{settings.source}: {settings.name}.{name} is missing")
    settings.within(name, size, Range(MIN_GROUP, MAX_SIZE))
    if size % MIN_GROUP:
        raise settings.error(name, f"must be -1 or a multiple of {MIN_GROUP}")
    return size


def groups_in_words(size: int) -> str:
    """A group size, for people."""
    return "a scale for each output" if size == -1 else f"groups of {size} inputs"


def names(settings: Settings, name: str) -> tuple[str, ...]:
    """A list of modules' names, empty where it is absent or null."""
    listed = settings.get(name, list[str], [])
    if len(listed) > MAX_PATTERNS:
        raise settings.error(name, f"has {len(listed)} names, and may have {MAX_PATTERNS}")
    return tuple(listed)


def refuse_unless(
    settings: Settings, name: str, kind: type[T], served: Sequence[T], *, required: bool = False
) -> T:
    """A setting that has one of the values served, the first where it is absent or null.

    Raises:
        ModelFileError: it has another, or is missing and required.
    """
    if required and not settings.has(name):
        raise ModelFileError(f"{settings.source}: {settings.name}.{name} is missing")
    value = settings.get(name, kind, served[0])
    if value not in served:
        known = " or ".join(str(known) for known in served)
        raise settings.error(name, f"is not served: {known} is")
    return value


def refuse_if_set(settings: Settings, *names: str) -> None:
    """Raises ModelFileError: one of these is there and neither null, false nor empty."""
    for name in names:
        if settings.has(name) and settings.values[name] not in (False, {}, []):
            raise settings.error(name, "is not implemented")
