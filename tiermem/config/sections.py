"""The policy file's sections and keys, as typed, frozen models: the one place where a key is declared.

The messages of refusals and the documentation of the file are generated from what stands here: a field's type
or its `allowed` text, its default, its description and its examples.
"""

import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from tiermem.config.size import Size

PAGE_ALIGNMENT = 4096
MAX_REQUEST = 256 * 1024**2
MAX_DEPTH = 1024


class Tier(enum.Enum):
    """A kind of memory. Iterating gives them from the fastest and smallest down."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def __str__(self) -> str:
        return self.value


def _to_tier(read: object) -> object:
    return Tier(read) if read in [tier.value for tier in Tier] else read


def _to_path(read: object) -> object:
    if not isinstance(read, str | os.PathLike) or not os.fspath(read):
        raise ValueError("it is not a path")
    if "\0" in os.fsdecode(read):
        raise ValueError("it has a NUL character")
    try:
        return Path(os.fsdecode(read)).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{error}") from None


def _to_tuple(read: object) -> object:
    return tuple(read) if isinstance(read, list) else read


def _to_request(read: object) -> object:
    size = Size.parse(read)  # type: ignore[arg-type]  # whatever was read: parse refuses what is no size
    if size.nbytes is None or size.nbytes % PAGE_ALIGNMENT or size.nbytes > MAX_REQUEST:
        raise ValueError(f"it is {'a percentage' if size.nbytes is None else f'{size.nbytes:,} bytes'}")
    return size


def _to_bytes(read: object) -> object:
    size = Size.parse(read)  # type: ignore[arg-type]  # as above
    if size.nbytes is None:
        raise ValueError("it is a percentage")
    return size


def _to_amount(read: object) -> object:
    size = None if read is None else Size.parse(read)  # type: ignore[arg-type]  # as above
    if size is not None and not size.nbytes:
        raise ValueError("it is a percentage" if size.nbytes is None else "it is nothing")
    return size


def _to_lookahead(read: object) -> object:
    if read == "auto" or isinstance(read, int):
        return read
    size = Size.parse(read)  # type: ignore[arg-type]  # as above
    if size.nbytes is None or (isinstance(read, str) and read.strip().isdigit()):
        raise ValueError(f"it {'is a percentage' if size.nbytes is None else 'has no unit'}")
    return size


def _to_seconds(read: object) -> object:
    return float(read) if isinstance(read, int) and not isinstance(read, bool) else read


TierOf = Annotated[Tier, BeforeValidator(_to_tier)]
FilePath = Annotated[Path, BeforeValidator(_to_path)]
Text = Annotated[str, Field(min_length=1)]
Units = Annotated[int, Field(ge=1)]

A_SIZE = 'a size, such as "512MiB", "20GB", "1.5 GiB", a number of bytes, or "80%" of what is free'
A_TIER = '"device", "host" or "disk"'


class Section(BaseModel):
    """What all sections have in common: immutable, hashable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def changed(self) -> Iterator[tuple[str, Any]]:
        """The keys that were given or differ from their defaults, with their values."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.model_fields_set or value != field.get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from self.changed()


def _key(description: str, allowed: str, examples: list[object]) -> Any:
    return Field(description=description, examples=examples, json_schema_extra={"allowed": allowed})


class DeviceSection(Section):
    """The memory that modules compute in.

    With the cpu as the device, the device and host tiers are one: modules compute straight from host frames,
    and of the two budgets only the host's counts.
    """

    kind: Annotated[
        str,
        Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$"),
        _key(
            "The device to compute on. `auto` takes the current CUDA device if there is one, else the cpu.",
            '"auto", "cuda", "cuda:N" or "cpu"',
            ["auto", "cuda:1", "cpu"],
        ),
    ] = "auto"
    budget: Annotated[
        Size,
        _key(
            "The most device memory that pages may take. What is left serves activations and the framework. "
            'Can\'t be given with `kind = "cpu"`; with `"auto"` and no CUDA it isn\'t used, and a note says so.',
            A_SIZE,
            ["20GiB", "80%"],
        ),
    ] = Size(percent=90)


class HostSection(Section):
    """The machine's own memory."""

    budget: Annotated[
        Size,
        _key(
            "The most memory that pages may take on the host. What is free, for a percentage, is what the kernel calls "
            "available, within the limits of the process's cgroups.",
            A_SIZE,
            ["48GiB", "512MiB", "50%"],
        ),
    ] = Size(percent=80)
    pinned: Annotated[
        Literal["auto"] | bool,
        _key(
            "Whether host frames are pinned, so that copies to and from a CUDA device overlap with compute. "
            "`auto` pins where there is CUDA and the system allows it; with `true` a failure is an error.",
            '"auto", true or false',
            ["auto", False],
        ),
    ] = "auto"


class DiskSection(Section):
    """Folders on local disks. Each run makes a locked folder of its own in them."""

    paths: Annotated[
        tuple[FilePath, ...],
        BeforeValidator(_to_tuple),
        _key(
            "The folders to keep pages in, one for each disk; pages are spread over them. `~` is expanded "
            "and a relative path starts from the working directory. Without any, `tiermem-UID` in "
            "`$TMPDIR`, or in `/var/tmp` where that is not set. It should be a real disk: `/tmp` is RAM on "
            "many machines.",
            "a list of paths",
            [["/nvme0/run"], ["/nvme0/run", "/nvme1/run"]],
        ),
    ] = ()
    budget: Annotated[
        Size,
        _key("The most bytes that pages may take on the disks together.", A_SIZE, ["1TiB", "50%"]),
    ] = Size(percent=90)
    keep: Annotated[
        bool,
        _key("Whether the page files stay when the model is closed.", "true or false", [True]),
    ] = False
    max_written_per_day: Annotated[
        Size | None,
        BeforeValidator(_to_amount),
        _key(
            "The most bytes that may be written to the paths in 24 hours, since disks wear, by this run and any before "
            "or beside it that has such a limit too. When they have been, training pauses before its next step, and "
            "says so. What was written is remembered in a file `tiermem-written-UID.json` in each path. Without it "
            "there is no limit.",
            "a size other than a percentage",
            ["2TB"],
        ),
    ] = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders to use: `paths`, or without any the user's own temporary one. None is created here."""
        if self.paths:
            return self.paths
        return (Path(os.environ.get("TMPDIR") or "/var/tmp") / f"tiermem-{os.getuid()}",)


class PlacementSection(Section):
    """The lowest tier that each kind of page may sink to.

    A higher one keeps it out of slower memory, and raises the smallest budget that will do. With a CUDA device,
    `device` is refused: what fits the device's budget stays there as it is.
    """

    parameters: Annotated[
        TierOf,
        _key("Parameters in the precision that modules compute in.", A_TIER, ["disk", "device"]),
    ] = Tier.DISK
    gradients: Annotated[
        TierOf,
        _key("Gradients, from backward to the optimizer's update.", A_TIER, ["host"]),
    ] = Tier.DISK
    optimizer: Annotated[
        TierOf,
        _key("Master weights and the optimizer's first and second moments.", A_TIER, ["host", "disk"]),
    ] = Tier.DISK
    activations: Annotated[
        TierOf,
        _key(
            "What autograd saves in the model's forward. `device` leaves it where it is, outside of the budgets. "
            "Otherwise it leaves after it was saved and comes back before its backward; an eighth of the host's budget "
            "(a quarter with `host`), or what is left of it, is kept for that. With the cpu as the device, `host` is "
            "where it is already.",
            A_TIER,
            ["disk", "host"],
        ),
    ] = Tier.DEVICE
    activation_size: Annotated[
        Size,
        BeforeValidator(_to_bytes),
        _key(
            "Saved tensors in less memory than this stay where they are.",
            'a size, such as "1MiB", or a number of bytes',
            ["256KiB"],
        ),
    ] = Size(1024**2)


class PolicySection(Section):
    """What is evicted and what is fetched ahead of its use."""

    eviction: Annotated[
        str,
        StringConstraints(pattern=r"^(plan|lru|belady|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$"),
        _key(
            "What makes room. `plan` computes all moves of a step beforehand, from the recorded schedule: what "
            "stays, where it lies, what is fetched and written when. The others are to compare with: `belady` "
            "evicts what the schedule needs last, and what it does not know as `lru` does. `lru` evicts what "
            "was used longest ago, which on a model's cyclic order reuses little. A class of yours is named as "
            "`module:Class`; it has the methods of `tiermem.policies.Eviction`, and `tiermem.policies.conformance` "
            "has the tests that it should pass.",
            '"plan", "lru", "belady" or "module:Class"',
            ["lru", "my_policies:Newest"],
        ),
    ] = "plan"
    prefetch: Annotated[
        Literal["none", "lookahead"],
        _key(
            "Whether pages are fetched ahead of their use, in the order of the recorded schedule.",
            '"none" or "lookahead"',
            ["none"],
        ),
    ] = "lookahead"
    lookahead: Annotated[
        Literal["auto"] | Units | Size,
        Field(union_mode="left_to_right"),
        BeforeValidator(_to_lookahead),
        _key(
            "How far ahead to prefetch: a number of units, or the bytes of the pages ahead. `auto` goes as "
            "far as "
            'there is room. Can\'t be given with `prefetch = "none"`.',
            '"auto", a number of units from 1 up, or a size such as "2GiB"',
            ["auto", 3, "2GiB"],
        ),
    ] = "auto"
    units: Annotated[
        tuple[Text, ...],
        BeforeValidator(_to_tuple),
        _key(
            "Patterns (`*`, `?`, `[...]`) of the names of the modules that are units. Without any, units "
            "are found automatically: repeated submodules, embeddings, heads.",
            "a list of patterns of module names",
            [["blocks.*", "head"]],
        ),
    ] = ()


class PrecisionSection(Section):
    """The formats that numbers are kept in. Master weights and moments are always float32."""

    parameters: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        _key(
            "The format that floating-point parameters are computed with. Without it they keep the module's "
            "own.",
            '"float32", "bfloat16" or "float16"',
            ["bfloat16"],
        ),
    ] = None


class RanksSection(Section):
    """How processes that train one model together share its state: `torchrun` starts them, `torch.distributed` finds
    them, and each pages its own share. A process that is alone isn't concerned. Every rank reads the same file; a
    percentage of what is free is shared by the ranks of a machine."""

    stage: Annotated[
        Literal[0, 1, 2, 3, "none"],
        _key(
            "What each rank keeps a slice of, instead of all: 0 nothing, 1 the optimizer's state, 2 the gradients as "
            "well, 3 the parameters as well. With `none` every process is on its own.",
            '0, 1, 2, 3 or "none"',
            [3, 2, "none"],
        ),
    ] = 3
    shards: Annotated[
        Literal["machine"] | Annotated[int, Field(ge=2)] | None,
        _key(
            "Hybrid sharding: how many ranks, one after the other, have the slices of the state between them; each "
            "further set of so many has a copy of it. `machine`: those on one machine, so that only sums of gradients "
            "go from machine to machine. Without it, all ranks.",
            '"machine", or a number of ranks from 2 up that divides them; not with stage 0',
            [2, "machine"],
        ),
    ] = None
    timeout: Annotated[
        float,
        BeforeValidator(_to_seconds),
        Field(gt=0),
        _key(
            "How many seconds a rank waits for the others before all of them end with an error that says who waits "
            "for what. Ranks that die, or wait for each other, are noticed at once.",
            "a number of seconds above 0",
            [600, 30.5],
        ),
    ] = 600.0
    reduce: Annotated[
        Literal["float32"] | None,
        _key(
            "The format that gradients are summed in over the ranks. Without it, their own.",
            '"float32"',
            ["float32"],
        ),
    ] = None


class IOSection(Section):
    """How page files are read and written."""

    engine: Annotated[
        Literal["auto", "libaio", "threads"],
        _key(
            "`libaio` is Linux's asynchronous I/O, `threads` ordinary reads and writes in threads. `auto` "
            "takes `libaio` where the system offers it.",
            '"auto", "libaio" or "threads"',
            ["threads"],
        ),
    ] = "auto"
    request: Annotated[
        Size,
        BeforeValidator(_to_request),
        _key(
            "The size of one request to the disk; a larger page is split into several.",
            f"a size that is a multiple of {PAGE_ALIGNMENT} bytes, up to {Size(MAX_REQUEST)}",
            ["1MiB", "256KiB"],
        ),
    ] = Size(1024**2)
    depth: Annotated[
        int,
        Field(ge=1, le=MAX_DEPTH),
        _key("How many requests are kept in flight.", f"an integer from 1 to {MAX_DEPTH}", [32, 128]),
    ] = 32


class DurabilitySection(Section):
    """What of a run survives a crash or a loss of power, to be taken up again with `resume`.

    Page files of a durable run stay in a folder `tiermem-durable-...`, and hold a state that is whole at any moment:
    see [durability.md](durability.md).
    """

    mode: Annotated[
        str,
        StringConstraints(pattern=r"^(off|step|every:[1-9][0-9]*|manual)$"),
        _key(
            "After which optimizer steps the state is committed, so that a killed run goes on from there. `step`: "
            "after each; `every:N`: after each N-th; `manual`: whenever `model.commit()` is called. With `off`, pages "
            "are written in place, which takes less space, and nothing survives.",
            '"off", "step", "every:N" with N from 1 up, or "manual"',
            ["step", "every:10"],
        ),
    ] = "off"
    commits: Annotated[
        int,
        Field(ge=1, le=4),
        _key(
            "How many commits stay whole at a time. With 1, parameters and the optimizer's state take twice their size "
            "on the disk; each more takes their size once more, and is there to go back to when pages of a later one "
            "turn out to be damaged.",
            "an integer from 1 to 4",
            [2],
        ),
    ] = 1

    @property
    def every(self) -> int | None:
        """How many steps apart commits are; 0 for those that are asked for, None without any."""
        if self.mode == "off":
            return None
        name, _, number = self.mode.partition(":")
        return {"step": 1, "manual": 0}.get(name) if not number else int(number)


class IntegritySection(Section):
    """Whether pages come back from the disk as they were written."""

    checksums: Annotated[
        bool,
        _key(
            "Whether a checksum (XXH3, 64 bits) of each page is taken when it is written, and compared when it is "
            "read. What is damaged is then named and never used.",
            "true or false",
            [False],
        ),
    ] = True


class TraceSection(Section):
    """The record of what was moved, when and why."""

    file: Annotated[
        FilePath | None,
        _key("The file to write the trace to. Without it none is written.", "a path", ["run.trace"]),
    ] = None
