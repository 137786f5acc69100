"""The runtime of one wrapped model: its tiers, pager and hooks, put together from a Config and taken apart again."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from functools import partial
from time import perf_counter_ns as now
from typing import Any

import torch
from torch import nn

from tiermem import budget
from tiermem.activations import Activations
from tiermem.adopt import Adoption
from tiermem.aio import Buffer, Checksums, Queue, open_queue
from tiermem.aio.memory import look
from tiermem.choices import ahead_of, eviction_of, prefetch_of
from tiermem.commits import Commits
from tiermem.config import Config, Size
from tiermem.config import Tier as TierName
from tiermem.cutting import cut_in_tiles, describe_tiles, ways_to_cut
from tiermem.descriptions import facts, infos, pages_of
from tiermem.device import Device, available_nbytes, open_device
from tiermem.disk import Disk, free_nbytes, weigh
from tiermem.door import Door
from tiermem.dtensors import DTensors
from tiermem.durable import DurableRun
from tiermem.errors import BudgetError, ConfigError, PagingError, format_bytes
from tiermem.hooks import Hooks
from tiermem.layout import LATER
from tiermem.ledger import Ledger
from tiermem.limits import measure_limits, rate_of
from tiermem.membership import join_ranks, local_ranks, meet_peers
from tiermem.page import ALIGNMENT, Kind, padded
from tiermem.pageable import is_compute, nbytes_of_buffers
from tiermem.pager import Pager
from tiermem.parallel import ALONE as APART
from tiermem.parallel import find_parallel
from tiermem.partition import ALONE
from tiermem.quota import Quota
from tiermem.ranks import Peers, Ranks, scratch_nbytes
from tiermem.resume import Resume, adopt_pages, describe, mark_damage, open_run, units_of
from tiermem.steps import Steps
from tiermem.table import PageTable
from tiermem.tier import Tier, trim_memory
from tiermem.tiling import NOTHING, Tiling
from tiermem.trace import POOL, AnyTrace, Event, NullTrace, PageInfo, Reason, Trace
from tiermem.transfer import Transfers
from tiermem.unit import Unit, build_units
from tiermem.whole import Whole

log = logging.getLogger("tiermem")

PLACEMENT = {
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients",
    Kind.MASTER: "optimizer",
    Kind.EXP_AVG: "optimizer",
    Kind.EXP_AVG_SQ: "optimizer",
    Kind.STATE: "optimizer",
    Kind.PARAMETER_SHARD: "parameters",
    Kind.GRADIENT_SHARD: "gradients",
}


GRADIENTS = (Kind.GRADIENT, Kind.GRADIENT_SHARD)
FIRST = (Kind.PARAMETER, Kind.GRADIENT, Kind.PARAMETER_SHARD, Kind.GRADIENT_SHARD)


class Runtime:
    """Everything that one wrapped model owns, opened in order and closed in reverse."""

    def __init__(
        self,
        net: nn.Module,
        config: Config,
        device: Device | None = None,
        group: Any = None,
        resume: Resume = None,
        pipeline: Any = None,
    ) -> None:
        self.config = config
        self.net = net
        self.run: DurableRun | None = None
        self.commits: Commits | None = None
        self._resume = resume
        self._ending = False
        self.closed = False
        self.queue: Queue | None = None
        self.notes: list[str] = []  # what is not as good as it could be, in words
        self.partition = ALONE
        self.tiling = NOTHING  # which parameters are in tiles
        self.peers: Peers | None = None
        self.ranks: Ranks | None = None
        self._given_device = device
        self._group = group  # of processes: what TieredModule was given
        self._pipeline = pipeline  # likewise
        self.parallel = APART
        self._stack = contextlib.ExitStack()
        self._opened = 0  # the process that opened it

    # -- opening ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the module over. Whatever breaks this off, the module is as it was afterwards.

        Raises ConfigError and BudgetError before anything has been changed.
        """
        with contextlib.ExitStack() as stack:
            self.device = self._given_device or open_device(self.config.device.kind)
            stack.callback(self.device.close)
            self._build(self.net, stack)
            with self.door.hold():
                self._stack = stack.pop_all()
                self._opened = os.getpid()
        for note in self.notes:
            log.warning(note)

    def _build(self, net: nn.Module, stack: contextlib.ExitStack) -> None:
        config, unified = self.config, self.device.unified
        try:
            eviction_of(config)
        except ValueError as error:
            raise ConfigError(f"policy.eviction: {error}") from error
        dtype = getattr(torch, config.precision.parameters) if config.precision.parameters else None
        dtensors = DTensors(net)
        self.parallel = find_parallel(config, dtensors, self._group, self._pipeline)
        stack.callback(dtensors.give_back)
        dtensors.take()
        self.peers, self.partition = meet_peers(net, config, self._group)
        self.run = open_run(net, config, dtype, self._resume, self.peers, self.partition)
        if self.run is not None:
            stack.callback(self.run.close)
            self.notes.extend(self.run.notes)
        capacity, device_capacity = self._cut(net, dtype)
        self.capacity = capacity
        total = sum(page.nbytes for page in self.table)
        note = budget.beyond(self.budgets["host"], min(capacity, total), look())
        self.notes.extend([note] if note else [])
        if unified and "budget" in config.device.model_fields_set:
            # kind = "cpu" refuses it; under "auto" one policy file may serve machines with CUDA and without.
            self.notes.append(
                f"device.budget: {config.device.budget} is not used: {self.device.name} is the device here, modules "
                f"compute from host memory, and host.budget, {format_bytes(self.budgets['host'])}, is what bounds them"
            )
        device_tier = None
        if device_capacity is not None:
            parameters = sum(page.nbytes for page in self.table if page.kind is Kind.PARAMETER)
            memory = self.device.allocate(min(device_capacity, parameters))
            device_tier = Tier("device", memory, eviction_of(config))
            stack.callback(device_tier.close)
        arena = self._arena(capacity, total)
        host = self._host("host", min(capacity - arena, total + self._spare()), stack)
        self.door = Door()
        paging = total > host.slab.nbytes
        sinking = arena > 0 and config.placement.activations is TierName.DISK
        self.disk = self._disk(stack) if paging or sinking or self.run is not None else None
        disk = self.disk if paging or self.run is not None else None
        if disk is None:
            for page in self.table:
                page.sinks = page.gathered
        self.limits: dict[str, float] = {}
        if config.trace.file is not None:
            whole = disk.whole if disk is not None else None
            self.limits = measure_limits(config, whole, host, device_tier, self.device)
        self.trace: AnyTrace = self._trace(arena)
        stack.callback(self.trace.close)
        checksums = None
        if self.queue is not None and config.integrity.checksums:
            with self.door.hold():
                checksums = Checksums(self.queue)
                stack.callback(checksums.close)
        transfers = Transfers(
            host, device_tier, disk, self.queue, self.device, self.trace, checksums=checksums
        )
        transfers.failures.modules = [unit.name for unit in self.units]
        if disk is not None:
            self._provide(disk, transfers)
        stack.callback(transfers.abandon)
        if self.peers is not None:
            self.ranks = join_ranks(self.peers, self.partition, self.units, transfers, config)
            stack.callback(self.ranks.close)  # before what they exchange is closed
            self.ranks.interrupted = lambda: self.door.interrupted
        named = {"plan": Reason.PLAN, "belady": Reason.BELADY, "lru": Reason.LRU}
        reason = named.get(config.policy.eviction, Reason.PLUGIN)
        moving = paging or not unified or self.partition.shards_parameters
        ahead = prefetch_of(config, self.table, host.slab.nbytes) if moving else None
        self.pager = Pager(
            self.table,
            transfers,
            ahead,
            reason,
            ahead=ahead_of(config) if moving and reason is Reason.PLAN else None,
        )
        stalls = transfers.counters.stall_ns
        self.steps = Steps(self.pager.follow, self.trace, lambda: sum(stalls.values()))
        self.hooks = Hooks(net, self.units, self.pager, self.steps, self.door, self.partition)
        self.hooks.reduction.parallel = self.parallel
        self.hooks.views.dtensors = dtensors if dtensors.locals else None
        for unit in self.units:
            for group in unit.groups:
                group.locals = dtensors.among(field.parameter for field in group.fields)
        if arena:
            tier = self._host("activations", arena, stack)
            moves = Transfers(
                tier, None, self.disk, self.queue, self.device, self.trace, self.pager.counters, checksums
            )
            moves.log.pool = len(self.units)
            least = config.placement.activation_size.resolve(0)
            self.hooks.views.activations = Activations(tier, moves, self.device, self.door, least, sinking)
            stack.callback(self.hooks.views.activations.close)
        self.adoption = Adoption(self.units, self.pager, disk, self.device, self.door, self.tiling)
        stack.push(self._undo)
        if self.run is not None and self.run.kept:
            self.adoption.resume()
        else:
            self.adoption.take()
        for module in net.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in self.hooks.home:
                    cast = dtype if dtype is not None and is_compute(buffer.dtype) else buffer.dtype
                    module._buffers[name] = buffer.to(device=self.device.torch_device, dtype=cast)
        if self.run is not None:
            assert disk is not None
            every = config.durability.every or 0
            self.commits = Commits(net, self.units, self.pager, disk, self.run, self.door, every)
            self.hooks.commits = self.commits
            self.commits.restore()
        given = []
        for unit in self.units:
            for group in unit.groups:
                for index, field in enumerate(group.fields):
                    gradient = field.parameter.grad
                    if gradient is not None and group.trainable:
                        with self.door.hold(), torch.no_grad():
                            self.hooks.gradients.land(group, index, gradient.to(group.dtype))
                            given.append((field.parameter, gradient))
        with self.door.hold():
            self.hooks.attach()
            for tiled in self.tiling.tiled.values():
                Whole(tiled, self.hooks, self.config.disk.folders[0]).attach()
            for parameter, _ in given:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
            self.adoption.settle()
        if self.ranks is not None:
            self.ranks.offer((page.key, page.version) for page in self.table if page.gathered)
        trim_memory()

    def _cut(self, net: nn.Module, dtype: torch.dtype | None) -> tuple[int, int | None]:
        """Resolve the budgets and cut the model into units and pages that work within them.

        Returns the bytes that pages may take on the host, and on the device where that has memory of its own.
        """
        config, unified = self.config, self.device.unified
        buffers = nbytes_of_buffers(net)
        overhead = buffers if unified else 0
        local = local_ranks() if self.peers is not None else 1
        self.budgets = {
            "host": config.host.budget.resolve(available_nbytes() // local),
            "disk": self._disk_budget(local),
        }
        if self.peers is not None:
            slices, replicas = self.partition.world, self.partition.replicas
            largest = padded(sum(p.nbytes for p in net.parameters()) + ALIGNMENT) // slices
            overhead += scratch_nbytes(largest, slices, replicas)
        capacity = budget.floor(max(0, self.budgets["host"] - overhead))
        if self.peers is not None:
            # One way to cut the model for all: what works for the smallest.
            capacity = min(self.peers.tell(capacity))
        device_capacity = None
        if not unified:
            self.budgets["device"] = config.device.budget.resolve(self.device.free_nbytes())
            device_capacity = budget.floor(max(0, self.budgets["device"] - buffers))
        for name in dict.fromkeys(PLACEMENT.values()):
            if getattr(config.placement, name) is TierName.DEVICE and not unified:
                raise ConfigError(
                    f'placement.{name}: read "device" with {self.device.name}, which has memory of its own; '
                    'allowed there is "host" or "disk" (what fits the device stays there all the same)'
                )
        sinks = {kind: getattr(config.placement, name) is TierName.DISK for kind, name in PLACEMENT.items()}
        device = self.device.torch_device
        resumed = self.run.layout if self.run is not None and self.run.kept else None

        def build(
            modules: dict[str, nn.Module], numel: int, tiling: Tiling = NOTHING
        ) -> tuple[PageTable, list[Unit]]:
            table = PageTable()
            numel = numel if resumed is None else resumed["part_numel"]
            return table, build_units(
                net, modules, table, dtype=dtype, device=device, part_numel=numel, sinks=sinks,
                partition=self.partition, tiling=tiling,
            )  # fmt: skip

        best = min(capacity, capacity if device_capacity is None else device_capacity) // 6
        limits = (capacity, device_capacity, (overhead, buffers))
        try:
            ways = ways_to_cut(net, config.policy.units, best) if resumed is None else units_of(net, resumed)
            cut = budget.fit(ways, build, *limits)
        except BudgetError as error:
            if self.run is not None or self.peers is not None or self.parallel:
                raise
            self.tiling, cut = cut_in_tiles(net, config.policy.units, dtype, error, build, *limits)
            self.notes.extend(describe_tiles(self.tiling, error, self.budgets[error.tier]))
        self.table, self.units = cut.table, cut.units
        self.need = cut.host.nbytes
        self.part_numel = cut.part_numel if resumed is None else resumed["part_numel"]
        if self.run is not None:
            partition = self.partition if self.peers is not None else None
            self.layout = describe(self.units, self.table, self.part_numel, partition)
            for group, page in pages_of(self.units):
                # Parameters in slices are what the ranks have: each commits its own.
                page.durable = page.kind not in GRADIENTS and page.shard is None
                if page.durable and group.trainable:
                    page.num_slots = 1 + self.run.num_kept
        self.smallest = {"host": cut.host.nbytes + overhead}
        if cut.device is not None:
            self.smallest["device"] = cut.device.nbytes + buffers
        return capacity, device_capacity

    def _disk_budget(self, local: int) -> int:
        size: Size = self.config.disk.budget
        if size.nbytes is not None:
            return size.nbytes
        free = self.run.nbytes if self.run is not None else 0
        for folder in self.config.disk.folders:
            with contextlib.suppress(OSError):
                free += free_nbytes(folder)
        return size.resolve(free // local)

    def _disk(self, stack: contextlib.ExitStack) -> Disk:
        """The disk tier, for a model that doesn't fit the host, or a run that is durable."""
        io, paths = self.config.io, [str(path) for path in self.config.disk.folders]
        self.queue = stack.enter_context(open_queue(io.engine, io.request.resolve(0), io.depth))
        disk = Disk(paths, self.budgets["disk"], self.queue, self.config.disk.keep, run=self.run)
        stack.callback(disk.close)
        if len(disk.folders) > 1:
            disk.weights = weigh([folder.path for folder in disk.folders], rate_of)
        if self.config.disk.max_written_per_day is not None:
            ledgers = [Ledger(folder.parent) for folder in disk.folders]
            disk.quota = Quota(self.config.disk.max_written_per_day.resolve(0), ledgers)
        disk.whole = sum(page.nbytes * page.num_slots for page in self.table if page.sinks or page.durable)
        if self.queue.engine != "libaio" and io.engine == "auto":
            self.notes.append(self.queue.note)
        self.notes.extend(disk.notes)
        return disk

    def _provide(self, disk: Disk, transfers: Transfers) -> None:
        """Give pages their places on the disk, so that a full one is found out now; or find those of a resumed run."""
        if self.run is None:
            # What the first step needs at the latest. State comes with the optimizer.
            transfers.provide(page for page in self.table if page.kind in FIRST and page.shard is None)
            return
        transfers.failures.damaged = partial(mark_damage, self.run)
        later = self.run.layout.get(LATER, []) if self.run.kept else []
        for unit, kind, name, nbytes in later:
            dtype = getattr(torch, name)
            sinks = self.config.placement.optimizer is TierName.DISK
            page = self.table.add(unit, Kind[kind.upper()], dtype, nbytes // dtype.itemsize, sinks=sinks)
            page.durable, page.num_slots = True, 1 + self.run.num_kept
            self.trace.record(Event.PAGE, now(), 0, unit, page.number, nbytes)
        if later:
            self.layout[LATER] = later
        adopt_pages(self.run, self.table, self.layout, disk)
        transfers.provide(page for page in self.table if page.shard is None)
        self.run.describe(self.layout, [page.slots for page in self.table])

    def _arena(self, capacity: int, total: int) -> int:
        """Bytes of the host's budget that are kept for activations: none where they stay in the device's memory."""
        place = self.config.placement.activations
        if place is TierName.DEVICE:
            return 0
        if place is TierName.HOST and self.device.unified:
            self.notes.append(
                f'placement.activations: "host" is where they are: {self.device.name} is the device'
            )
            return 0
        least = self.config.placement.activation_size.resolve(0)
        arena = budget.arena(capacity, total, self.need, 8 if place is TierName.DISK else 4)
        self.notes.extend([budget.no_arena(arena, least, self.need)] if arena < least else [])
        return arena

    def _spare(self) -> int:
        """Bytes for an optimizer that keeps more than ours; they take no memory until they are used, unless pinned."""
        return (
            2 * sum(page.nbytes for page in self.table if page.kind is Kind.EXP_AVG)
            if self.device.unified
            else 0
        )

    def _host(self, name: str, nbytes: int, stack: contextlib.ExitStack) -> Tier:
        """A slab of the host's: one buffer, pinned where there is CUDA."""
        # The tensor keeps the buffer alive: unmapping it while somebody holds a view would be a crash of theirs.
        memory = torch.frombuffer(Buffer(max(nbytes, ALIGNMENT)).view, dtype=torch.uint8)
        if self.config.host.pinned is not False:
            pinning = self.device.pin(memory)
            if pinning.startswith("refused"):
                if self.config.host.pinned is True:
                    raise ConfigError(f"host.pinned: read true; the frames' registration was {pinning}")
                self.notes.append(f"host frames: {pinning}")
            else:
                stack.callback(self.device.unpin, memory)
        host = Tier(name, memory, eviction_of(self.config))
        stack.callback(host.close)
        return host

    def _trace(self, arena: int) -> AnyTrace:
        if self.config.trace.file is None:
            return NullTrace()
        meta: dict[str, Any] = {
            "policy": self.config.to_toml(),
            "device": self.device.name,
            "limits": self.limits,
            "cut": {"part_numel": self.part_numel, "beside": self.budgets["host"] - self.capacity},
        }
        file = self.config.trace.file
        if self.peers is not None:
            meta |= {"rank": self.peers.rank, "world": self.peers.world}
            file = file.with_name(f"{file.stem}.{self.peers.rank}{file.suffix}")
        kind = Kind.ACTIVATION.name.lower()
        pool = [PageInfo(POOL, len(self.units), kind, "uint8", arena)] if arena else []
        return Trace.create(
            file,
            units=[unit.name for unit in self.units] + ["(activations)"] * len(pool),
            pages=[*sorted(infos(self.units), key=lambda info: info.number), *pool],
            budgets=self.budgets,
            meta=meta,
        )

    # -- closing ------------------------------------------------------------------------------------------

    def _undo(self, kind: object, error: object, trace: object) -> None:
        """When opening is broken off after the parameters were taken: give them back."""
        if kind is not None:
            self.hooks.detach()
            self.pager.transfers.drain()
            self.adoption.undo()

    def close(self, restore: bool = True) -> None:
        """Give the parameters back (with ``restore``), then everything else; idempotent.

        If an error breaks it off, nothing has been given up, and it can be called again. In a forked child it does
        nothing: what there is to close is the parent's.
        """
        if self.closed or self._opened != os.getpid():
            return
        if self.pager.watcher is not None:
            self.pager.watcher.settle()
        if restore:
            self.hooks.unwind()
            self.hooks.settle()
        self.hooks.detach()
        if restore and self.partition.shards_parameters and self.ranks is not None and self.ranks.failed:
            warnings.warn(
                "the parameters are in slices on the ranks, which can't go on: they are not given back (NaN is in "
                "their place)",
                RuntimeWarning,
                stacklevel=3,
            )
            restore = False
        if self.commits is not None and not self._ending:
            self._ending = True  # if this fails, the next call closes without
            self.commits.close()
        with self.door:
            self.pager.follow(None)  # no next step is prepared any more
            if self.ranks is not None and self.ranks.failed:
                self.pager.transfers.abandon()
            self.pager.transfers.drain()
            if self.config.disk.keep and self.disk is not None:
                self.pager.flush()
                self.disk.describe((page, facts(page, group)) for group, page in pages_of(self.units))
            if restore:
                self.adoption.give_back()
            else:
                for unit in self.units:
                    for group in unit.groups:
                        group.unbind()
        with self.door.hold():
            self.closed = True
            for unit in self.units:
                for group in unit.groups:
                    group.places.clear()  # they would keep the slab's memory
            self._stack.close()

    # -- telling ------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one ends with an error: nobody waits for it then."""
        if self.ranks is not None and not self.closed:
            self.ranks.leave(f"its training ended: {type(error).__name__}: {error}")

    def check_open(self) -> None:
        """Raise PagingError when the model has been closed."""
        if self.closed:
            raise PagingError("this TieredModule is closed; use the module that it wrapped, or wrap it again")

    def check(self) -> None:
        """Assert the invariants of all pages and frames (for tests)."""
        with self.door:
            self.pager.room.loans.collect()
            self.table.check(self.pager.host.slab, self.pager.device.slab if self.pager.device else None)
