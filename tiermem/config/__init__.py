"""The configuration of a run: what the policy file says, typed and frozen.

`Config.load` takes the file, a dict of the same shape, or nothing at all, and gives a Config in which every
key has a value, or refuses with every problem it found. `python -m tiermem.config` prints the file's
documentation.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union

from pydantic import ValidationError

from tiermem.config import refusals, toml
from tiermem.config.sections import (
    DeviceSection,
    DiskSection,
    DurabilitySection,
    HostSection,
    IntegritySection,
    IOSection,
    PlacementSection,
    PolicySection,
    PrecisionSection,
    RanksSection,
    Section,
    Tier,
    TraceSection,
)
from tiermem.config.size import Size
from tiermem.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Config",
    "DeviceSection",
    "DiskSection",
    "DurabilitySection",
    "HostSection",
    "IOSection",
    "IntegritySection",
    "PlacementSection",
    "PolicySection",
    "PrecisionSection",
    "RanksSection",
    "Size",
    "Source",
    "Tier",
    "TraceSection",
]

Source = Union[str, "os.PathLike[str]", Mapping[str, Any], "Config", None]


class Config(Section):
    """Everything that a policy file can say. Immutable and hashable; equal when all values are equal.

    Built from sections or dicts of their keys: `Config(host={"budget": "4GiB"})`. Raises ConfigError.
    """

    device: DeviceSection = DeviceSection()
    host: HostSection = HostSection()
    disk: DiskSection = DiskSection()
    placement: PlacementSection = PlacementSection()
    policy: PolicySection = PolicySection()
    precision: PrecisionSection = PrecisionSection()
    ranks: RanksSection = RanksSection()
    io: IOSection = IOSection()
    durability: DurabilitySection = DurabilitySection()
    integrity: IntegritySection = IntegritySection()
    trace: TraceSection = TraceSection()

    def __init__(self, /, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(*refusals.sentences(error, sections, section_models())) from None
        contradictions = list(self._contradictions())
        if contradictions:
            raise ConfigError(*contradictions)

    @classmethod
    def load(cls, source: Source = None) -> "Config":
        """The configuration that `source` describes: a TOML file's path, a mapping, a Config, or None for
        defaults.

        Raises ConfigError, naming the file, with every problem found: a file that can't be read, TOML that
        isn't, unknown keys, values that are not allowed, keys that contradict each other.
        """
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        if isinstance(source, Mapping):
            return cls._checked(source, "dict")
        if isinstance(source, str | os.PathLike):
            path = Path(source).expanduser()
            return cls._checked(_read(path), str(path))
        raise ConfigError(
            f"read an object of type {type(source).__name__}; "
            "allowed is the path of a TOML file, a dict, a Config or None"
        )

    @classmethod
    def _checked(cls, read: Mapping[str, Any], name: str) -> "Config":
        tables = {
            str(key): dict(table) if isinstance(table, Mapping) else table for key, table in read.items()
        }
        try:
            return cls(**tables)
        except ConfigError as error:
            raise ConfigError(*error.problems, source=name) from None

    def _contradictions(self) -> Iterator[str]:
        if self.device.kind == "cpu" and "budget" in self.device.model_fields_set:
            yield (
                f"device.budget: read {toml.show(self.device.budget)} with "
                'device.kind = "cpu", where the device and host tiers are one; allowed is host.budget alone'
            )
        if self.device.kind == "cpu" and self.host.pinned is True:
            yield (
                'host.pinned: read true with device.kind = "cpu", where there is no CUDA to pin for; '
                'allowed is "auto" or false'
            )
        if self.policy.prefetch == "none" and "lookahead" in self.policy.model_fields_set:
            yield (
                f"policy.lookahead: read {toml.show(self.policy.lookahead)} with "
                'policy.prefetch = "none", which looks nowhere; '
                'allowed is no lookahead, or policy.prefetch = "lookahead"'
            )
        if self.disk.keep and self.durability.mode != "off":
            yield (
                f"disk.keep: read true with durability.mode = {toml.show(self.durability.mode)}, where page files "
                "stay as it is; allowed is one of the two"
            )
        if self.ranks.shards is not None and self.ranks.stage in (0, "none"):
            yield (
                f"ranks.shards: read {toml.show(self.ranks.shards)} with ranks.stage = {toml.show(self.ranks.stage)}, "
                "where nothing is in slices; allowed with ranks.stage 1, 2 or 3"
            )
        seen: dict[str, Path] = {}
        for path in self.disk.paths:
            first = seen.setdefault(os.path.realpath(path), path)
            if first is not path:
                yield (
                    f"disk.paths: read {toml.show(first)} and {toml.show(path)}, which are one folder; "
                    "allowed is each folder once"
                )

    def to_toml(self) -> str:
        """A policy file that loads as an equal Config: the keys that were given or aren't the defaults."""
        tables = []
        for name in section_models():
            # None is the absence of a key, which TOML writes by not writing it.
            keys = [(key, value) for key, value in getattr(self, name).changed() if value is not None]
            if keys:
                tables.append(
                    "\n".join([f"[{name}]", *(f"{key} = {toml.encode(value)}" for key, value in keys)])
                )
        return "\n\n".join(tables) + "\n" if tables else ""


def section_models() -> dict[str, type[Section]]:
    """The model of each section, by its name in the file, in the file's order."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte order mark. utf-8-sig would count an error's byte from behind it.
        return tomllib.loads(path.read_text(encoding="utf-8").removeprefix("\ufeff"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the policy file can't be read: {reason}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8, as TOML must be", source=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        # Its message ends in the line and column.
        raise ConfigError(f"this is not TOML: {error}", source=str(path)) from error
