"""compressed-tensors, as llm-compressor writes it: groups of modules, each stored in its own way.

What is served is in `compressed_schemes`; here is which module has which scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.settings import Settings
from nanocore.worker.loading.formats.compressed_schemes import Scheme, read_scheme
from nanocore.worker.loading.formats.patterns import NameList
from nanocore.worker.loading.formats.settings import names, refuse_if_set, refuse_unless
from nanocore.worker.loading.formats.stored import StoredTensors, aliases
from nanocore.worker.loading.weight_format import StoredProjection
from nanocore.worker.loading.weights import EMBEDDING

_LINEAR: Final = "Linear"
_MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules with one scheme. is_general: all linear layers, which no other group names."""

    targets: NameList
    is_general: bool
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """A `WeightFormat`."""

    groups: tuple[_Group, ...]
    stored: StoredTensors
    name: str = "compressed-tensors"

    @classmethod
    def read(cls, settings: Settings, stored: StoredTensors) -> CompressedTensorsFormat:
        """From quantization_config. Raises ModelFileError: it says what is not served."""
        refuse_unless(settings, "quantization_status", str, ("compressed", "frozen"))
        refuse_if_set(settings, "kv_cache_scheme", "transform_config", "moe_sparsity_config")
        sparsity = settings.section("sparsity_config")
        refuse_unless(sparsity, "format", str, ("dense",))
        config_groups = settings.section("config_groups")
        if not config_groups.values:
            raise settings.error("config_groups", "names no group of modules")
        if len(config_groups.values) > _MAX_GROUPS:
            raise ModelFileError(
                f"{settings.source}: config_groups has {len(config_groups.values)} groups; "
                f"{_MAX_GROUPS} are read"
            )
        default = settings.values.get("format")
        return cls(
            tuple(_read_group(config_groups, name, default) for name in config_groups.values),
            stored,
        )

    def __str__(self) -> str:
        return f"compressed-tensors: {'; '.join(str(group.scheme) for group in self.groups)}"

    def projection(
        self, name: str, shape: tuple[int, int], rows: slice, columns: slice
    ) -> StoredProjection | None:
        """See `WeightFormat`."""
        scheme = self._scheme_of(name)
        if scheme is None:
            if any(self.stored.has(f"{name}.{end}") for end in ("weight_packed", "weight_scale")):
                raise ModelFileError(
                    f"{name} is quantized in the files, and no group in quantization_config's "
                    "config_groups has it"
                )
            return None
        return scheme.projection(name, shape, rows, columns, self.stored)

    def _scheme_of(self, name: str) -> Scheme | None:
        """A group that names the module goes before one of all linear layers, as in vLLM."""
        all_names = aliases(name)
        named = [g for g in self.groups if any(alias in g.targets for alias in all_names)]
        general = [group for group in self.groups if group.is_general]
        for group in named if f"{name}.weight" == EMBEDDING else named + general:
            is_stored = self.stored.has(f"{name}.{group.scheme.marker}")
            return group.scheme if is_stored else None
        return None


def _read_group(groups: Settings, name: str, default_format: Any) -> _Group:
    group = groups.section(name)
    targets = names(group, "targets")
    own_format = group.values.get("format") or default_format
    scheme = read_scheme(group.with_values(group.values | {"format": own_format}))
    listed = NameList(f"{group.source}: {group.name}.targets", targets)
    return _Group(listed, _LINEAR in targets, scheme)
