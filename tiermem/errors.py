"""The errors that tiermem raises, all of them a TiermemError, and how their numbers are written.

Each is also of the built-in family that a caller would expect (ValueError, MemoryError, OSError,
RuntimeError), carries its numbers as attributes, and survives pickling, since a worker process may be the one
that raises it.
"""

import errno
import os

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: "512 B", "1.50 GiB" (powers of 1024, two decimals)."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    amount = nbytes / 1024
    power = 0
    # 1023.995 would be written as 1024.00, which is 1.00 of the next unit.
    while abs(amount) >= 1023.995 and power < len(_BINARY_UNITS) - 1:
        amount /= 1024
        power += 1
    return f"{amount:.2f} {_BINARY_UNITS[power]}"


class TiermemError(Exception):
    """Whatever tiermem refuses or fails to do."""


class ConfigError(TiermemError, ValueError):
    """A configuration that is refused, with every problem found in it.

    `problems` has one sentence for each, `source` names what was read: a file's path, "dict", or None when
    the problem shows only later, as when a pattern of units matches no module.
    """

    def __init__(self, *problems: str, source: str | None = None) -> None:
        super().__init__(*problems)
        self.problems = problems
        self.source = source

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return where + self.problems[0]
        return f"{where}{len(self.problems)} problems\n" + "\n".join(f"  - {each}" for each in self.problems)


class BudgetError(TiermemError, MemoryError):
    """More bytes were asked of a tier than its budget can ever give.

    `asked` and `had` are in bytes, `had` being what the budget left for this; `tier` is the tier's name;
    `smallest` is the smallest budget in bytes that would do, None when it is not known; `what` names what the
    bytes were for; `arithmetic` says how the numbers came about.
    """

    def __init__(
        self,
        asked: int,
        had: int,
        tier: str,
        smallest: int | None = None,
        what: str = "",
        arithmetic: str = "",
    ) -> None:
        super().__init__(asked, had, tier, smallest, what, arithmetic)
        self.asked = asked
        self.had = had
        self.tier = tier
        self.smallest = smallest
        self.what = what
        self.arithmetic = arithmetic

    def __str__(self) -> str:
        purpose = f" for {self.what}" if self.what else ""
        parts = [f"{self.tier}: asked {_exact(self.asked)}{purpose}, had {_exact(self.had)}"]
        if self.arithmetic:
            parts.append(self.arithmetic)
        if self.smallest is not None:
            parts.append(f"the smallest {self.tier} budget that would do is {_exact(self.smallest)}")
        return "; ".join(parts)


class TransferError(TiermemError, OSError):
    """A page could not be copied from one tier to another; the copy at its source is still good.

    `page` describes the page, `source` and `destination` are the tiers' names, `path` is the file concerned
    (None when there is none), `errno` the system's number for the failure (0 when it has none, as for a short
    read), `detail` what else is known.
    """

    def __init__(
        self,
        page: str,
        source: str,
        destination: str,
        path: str | None = None,
        errno: int = 0,
        detail: str = "",
    ) -> None:
        super().__init__(errno, os.strerror(errno) if errno else detail, path)
        self.page = page
        self.source = source
        self.destination = destination
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        where = f" ({self.path})" if self.path else ""
        reason = f"[Errno {self.errno}] {self.strerror}" if self.errno else ""
        why = "; ".join(part for part in (reason, self.detail) if part)
        return f"{self.page}: {self.source} to {self.destination} failed{where}: {why or 'no reason given'}"

    def __reduce__(self) -> tuple[object, ...]:
        # OSError would rebuild it from (errno, strerror, filename), which are not its arguments.
        arguments = (self.page, self.source, self.destination, self.path, self.errno or 0, self.detail)
        return (type(self), arguments, self.__dict__)


class IntegrityError(TransferError):
    """A page on the disk isn't what was written there: a flipped bit, a lost write, a file that somebody changed.

    `offset` is the byte of the file `path` that it begins at, `expected` and `found` are checksums (XXH3, 64 bits). The
    page wasn't used. `advice` says what can be done about it.
    """

    def __init__(
        self, page: str, path: str | None, offset: int, expected: int, found: int, advice: str = ""
    ) -> None:
        detail = (
            f"the bytes at offset {offset:,} have checksum {found:016x}, and {expected:016x} was written: the disk, "
            f"or somebody, has changed them. They were not used{advice}"
        )
        super().__init__(page, "disk", "host", path, errno.EIO, detail)
        self.offset = offset
        self.expected = expected
        self.found = found
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.page, self.path, self.offset, self.expected, self.found, self.advice)
        return (type(self), arguments, self.__dict__)


class PagingError(TiermemError, RuntimeError):
    """A use that paging cannot serve: after close, a graph whose pages are gone, a call out of order."""


class CheckpointError(TiermemError, ValueError):
    """A checkpoint that can't be read or written as asked, with every problem found in it.

    `problems` has one sentence for each: a name that is missing, a shape or dtype that differs, a damaged file.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return f"{len(self.problems)} problems\n" + "\n".join(f"  - {each}" for each in self.problems)


class SavingError(TiermemError, OSError):
    """A checkpoint could not be written: `errno`, `strerror` and `filename` say why. What was there before is whole."""

    def __str__(self) -> str:
        return f"saving failed: {super().__str__()}"


class RanksError(TiermemError, RuntimeError):
    """Ranks that train together can't go on: one has died or left, or they wait for each other for ever.

    `rank` is the one that it began with, None where it is not one's fault alone. Every rank raises it with one text.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text, rank)
        self.text = text
        self.rank = rank

    def __str__(self) -> str:
        return self.text


def _exact(nbytes: int) -> str:
    text = format_bytes(nbytes)
    return text if abs(nbytes) < 1024 else f"{text} ({nbytes:,} bytes)"
