"""Amounts of memory as people write them: "512MiB", "1.5 GB", 4096, or "80%" of what is free."""

import dataclasses
import re
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*")


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of bytes, or a percentage of the bytes that will be found free: exactly one of the two."""

    nbytes: int | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        if (self.nbytes is None) == (self.percent is None):
            raise ValueError("a Size is either bytes or a percentage")
        if self.nbytes is not None and self.nbytes < 1:
            raise ValueError("a size must be at least one byte")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ValueError("a percentage must be above 0 and at most 100")

    @classmethod
    def parse(cls, written: "str | int | Size") -> "Size":
        """The size that `written` means; a number without a unit is in bytes, a part of a byte is dropped.

        Raises ValueError when it means none: an unknown unit, nothing, less than a byte, over 100 %.
        """
        if isinstance(written, Size):
            return written
        if isinstance(written, int) and not isinstance(written, bool):
            return cls(nbytes=written)
        match = _WRITTEN.fullmatch(written) if isinstance(written, str) else None
        if match is None:
            raise ValueError("it is not a size")
        number, unit = Decimal(match[1]), match[2]
        if unit == "%":
            return cls(percent=float(number))
        factor = _BY_LOWER_CASE.get((unit or "B").lower())
        if factor is None:
            raise ValueError(f"{unit!r} is not a unit of size; units are {', '.join(_UNITS)} and %")
        return cls(nbytes=int(number * factor))

    def resolve(self, free: int) -> int:
        """This size in bytes, when `free` bytes are free for it; a percentage is rounded down."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.percent is not None
        return int(free * Decimal(repr(self.percent)) / 100)

    def __str__(self) -> str:
        """The shortest exact text that parses to this size."""
        if self.percent is not None:
            return f"{Decimal(repr(self.percent)).normalize():f}%"
        assert self.nbytes is not None
        exact = (
            f"{self.nbytes // factor}{unit}" for unit, factor in _UNITS.items() if self.nbytes % factor == 0
        )
        return min(exact, key=len)

    def __repr__(self) -> str:
        return f"Size({str(self)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )
