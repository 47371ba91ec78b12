"""Which layers attend through a sliding window, and how wide it is.

A family has a rule of its own, made by one of the functions here; `layer_types` may say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.rope_settings import LAYER_TYPES, LayerType
from nanocore.worker.config.settings import MAX_SIZE, Range, Settings

WindowRule = Callable[[Settings, int], tuple[int | None, list[bool]]]
"""Settings and number of layers to the window, None for none, and which layers have it."""


def no_window(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
    """No layer has one, and a file that asks for it is refused."""
    if settings.has("sliding_window"):
        raise settings.error("sliding_window", "is not implemented for this architecture")
    return None, [False] * num_layers


def window_everywhere(default: int | None) -> WindowRule:
    """Every layer has it, unless it is null. default: in tokens, where the file says nothing."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, default)
        return window, [window is not None] * num_layers

    return rule


def window_if_asked(chosen: Callable[[int, int], bool]) -> WindowRule:
    """A window that must be switched on. chosen: of layer index and max_window_layers."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        if not settings.get("use_sliding_window", bool, False):
            return None, [False] * num_layers
        window = settings.nullable("sliding_window", int, 4096)
        limit = settings.get("max_window_layers", int, 28)
        settings.within("max_window_layers", limit, Range(0, MAX_SIZE))
        return window, [window is not None and chosen(i, limit) for i in range(num_layers)]

    return rule


def window_with_gaps(period: int, period_setting: str | None) -> WindowRule:
    """All layers but every period-th."""

    def rule(settings: Settings, num_layers: int) -> tuple[int | None, list[bool]]:
        window = settings.nullable("sliding_window", int, 4096)
        every = settings.size(period_setting, period) if period_setting else period
        return window, [(i + 1) % every != 0 for i in range(num_layers)]

    return rule


def read_layer_types(
    settings: Settings, rule: WindowRule, num_layers: int, free_layer_types: bool
) -> tuple[tuple[LayerType, ...], int]:
    """Each layer's kind of attention, and the window in tokens; 0 if no layer has one.

    Raises:
        ModelFileError: `layer_types` does not fit the family or the number of layers, or a window
            is needed and not given.
    """
    window, windowed = rule(settings, num_layers)
    types: list[LayerType] = [LAYER_TYPES[is_windowed] for is_windowed in windowed]
    declared = settings.get("layer_types", list[str], [])
    if declared and declared != types:
        if not free_layer_types:
            raise settings.error("layer_types", "is not implemented for this architecture")
        if len(declared) != num_layers:
            raise settings.error("layer_types", f"must have {num_layers} entries, one per layer")
        types = [_layer_type(settings, name) for name in declared]
    if "sliding_attention" not in types:
        return tuple(types), 0
    if window is None:
        raise ModelFileError(
            f"{settings.source}: layers of sliding_attention need a sliding_window"
            + (" and use_sliding_window" if settings.has("use_sliding_window") else "")
        )
    return tuple(types), settings.within("sliding_window", window, Range(1, MAX_SIZE))


def _layer_type(settings: Settings, name: str) -> LayerType:
    for known in LAYER_TYPES:
        if name == known:
            return known
    raise settings.error("layer_types", f"is not implemented; known: {', '.join(LAYER_TYPES)}")
