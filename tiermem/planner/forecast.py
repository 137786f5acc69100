"""Forecasts: whether a model fits a machine, how long a step takes, and what of the machine it is that takes so long.

The model is cut as a real run cuts it, by the same code, and its plans are the ones that a run compiles. What is
computed is ideal arithmetic at a stated share of the peak, and what the links carry goes at their rated speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem import budget
from tiermem.cutting import ways_to_cut
from tiermem.errors import BudgetError, format_bytes
from tiermem.page import Kind
from tiermem.parts import part_numel
from tiermem.planner.commits import added, space
from tiermem.planner.model import Model
from tiermem.planner.process import PROCESS_NBYTES
from tiermem.planner.shape import Training, activation_nbytes
from tiermem.planner.steps import UPDATE_EFFORT, UPDATE_NBYTES, Rates, lay_out
from tiermem.plans import Area, Plans
from tiermem.policies import Ahead, Plan, Schedule, eviction
from tiermem.policies.compiler import LINK
from tiermem.policies.timeline import Link, play
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.unit import Unit, build_units

UTILISATION = 0.45
"""The share of a device's peak that training reaches. Chowdhery et al., "PaLM" (arXiv:2204.02311), table 3, have 21 to
46 % for large models; the upper end is what good kernels give."""
SYSTEM_SHARE = 0.05
"""Of RAM, and of a device's memory: left to the system, and to what the allocator loses between tensors."""
CUDA_HOST_NBYTES = 3 << 30
"""Of RAM: what a process with CUDA has of its own."""
CUDA_CONTEXT_NBYTES = 600 << 20
"""Of a device's memory: what CUDA and its libraries take."""
MAX_PARTS = 400
"""Pages of one kind of optimizer state in all, from where parts are planned larger than a run has them."""
DAY = 86_400

PLACES = {
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients",
    Kind.MASTER: "optimizer",
    Kind.EXP_AVG: "optimizer",
    Kind.EXP_AVG_SQ: "optimizer",
}


@dataclass(frozen=True)
class Hardware:
    """A machine, in bytes, bytes per second and FLOP per second.

    ``device_nbytes`` is None where modules compute on the cpu. ``flops`` is the peak in the run's precision, of one
    device; ``update`` the rate of the optimizer's reads and writes in RAM. ``ranks`` devices share RAM and disks; that
    is a forecast of what sharding would give where ranks exchange at the link's rate. ``host_budget`` fixes the host's
    budget instead of what RAM leaves.
    """

    ram_nbytes: int
    flops: float
    update: float
    disk_nbytes: int = 0
    disk: Link = LINK
    device_nbytes: int | None = None
    pcie: float = 25e9
    ranks: int = 1
    host_budget: int | None = None
    process_nbytes: int = PROCESS_NBYTES
    utilisation: float = UTILISATION


@dataclass(frozen=True)
class Forecast:
    """What is predicted. Sizes in bytes, times in seconds; those of a step in the steady state.

    ``fits`` is False where a budget can't work, and then ``reason`` says why and every figure of a step is 0.
    ``budgets`` are of pages alone; ``peak_nbytes`` is the whole process's memory on the host. ``carried`` are the bytes
    of each link in a step, ``busy`` the seconds that each part of the machine works in it.
    """

    model: Model
    hardware: Hardware
    training: Training
    fits: bool
    reason: str = ""
    budgets: dict[str, int] = field(default_factory=dict)
    smallest: dict[str, int] = field(default_factory=dict)
    activations: int = 0
    peak_nbytes: int = 0
    disk_nbytes: int = 0
    state: dict[str, dict[str, int]] = field(default_factory=dict)
    step: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    effort: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    carried: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    num_units: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.training.tokens * self.hardware.ranks / self.step if self.step else 0.0

    @property
    def bottleneck(self) -> str:
        """What of the machine works longest in a step."""
        return max(self.busy, key=self.busy.__getitem__, default="")

    @property
    def nbytes_written_a_day(self) -> int:
        """To all disks together, in a run that never stops."""
        return int(self.carried.get("host to disk", 0) / self.step * DAY) if self.step else 0

    def to_dict(self) -> dict[str, Any]:
        """All figures, as plain data."""
        training, hardware = self.training, self.hardware
        return {
            "model": {"name": self.model.name, "parameters": self.model.num_parameters},
            "training": {
                "batch": training.batch,
                "sequence": training.sequence,
                "precision": training.precision,
                "accumulation": training.accumulation,
                "checkpointing": training.checkpointing,
                "durability": training.durability,
                "commits": training.commits,
            },
            "ranks": hardware.ranks,
            "fits": self.fits,
            "reason": self.reason,
            "budgets": self.budgets,
            "smallest": self.smallest,
            "activations": self.activations,
            "peak_nbytes": self.peak_nbytes,
            "disk_nbytes": self.disk_nbytes,
            "state": self.state,
            "units": self.num_units,
            "step_seconds": self.step,
            "tokens_per_second": self.tokens_per_second,
            "compute_seconds": self.compute,
            "optimizer_seconds": self.update,
            "transfers_seconds": self.effort,
            "wait_seconds": self.waits,
            "carried_nbytes": self.carried,
            "busy_seconds": self.busy,
            "bottleneck": self.bottleneck,
            "nbytes_written_a_day": self.nbytes_written_a_day,
        }

    def policy(self, folders: Sequence[Path] = ()) -> dict[str, dict[str, Any]]:
        """The policy file's tables that this forecast is for."""
        unified = self.hardware.device_nbytes is None
        tables: dict[str, dict[str, Any]] = {
            "device": {"kind": "cpu"} if unified else {"kind": "auto", "budget": self.budgets["device"]},
            "host": {"budget": self.budgets["host"]},
        }
        if self.hardware.disk_nbytes:
            tables["disk"] = {"budget": self.hardware.disk_nbytes}
            if folders:
                tables["disk"]["paths"] = list(folders)
        else:
            tables["placement"] = dict.fromkeys(dict.fromkeys(PLACES.values()), "host")
        if self.training.every is not None:
            tables["durability"] = {"mode": self.training.durability, "commits": self.training.commits}
        tables["precision"] = {"parameters": {"bf16": "bfloat16", "fp32": "float32"}[self.training.precision]}
        return tables


class Draft(NamedTuple):
    """A model cut for its budgets, and the plans of its step."""

    table: PageTable
    units: list[Unit]
    needs: dict[str, int]
    plans: dict[str, Plan]


Drafts = dict[tuple[Any, ...], Draft]


def forecast(model: Model, hardware: Hardware, training: Training, drafts: Drafts | None = None) -> Forecast:
    """Predict a run. What doesn't fit is no error, but a forecast that says so.

    ``drafts`` keeps what takes long: a forecast that differs in rates alone is played with the plans of another.
    """
    unified = hardware.device_nbytes is None
    activations = activation_nbytes(model.decoder, training)
    # One that autograd is producing while the one before it lands.
    gradient = 2 * _largest(model.net) * training.dtype.itemsize
    usable = int(hardware.ram_nbytes * (1 - SYSTEM_SHARE))
    beside = hardware.process_nbytes + (activations + gradient if unified else CUDA_HOST_NBYTES)
    host = hardware.host_budget if hardware.host_budget is not None else usable - beside
    device: int | None = None
    if hardware.device_nbytes is not None:
        device = (
            int(hardware.device_nbytes * (1 - SYSTEM_SHARE)) - CUDA_CONTEXT_NBYTES - activations - gradient
        )
    budgets = {"host": max(0, host)} | ({} if device is None else {"device": max(0, device)})

    def refused(reason: str, smallest: dict[str, int] | None = None) -> Forecast:
        return Forecast(
            model, hardware, training, False, reason, budgets, smallest or {}, activations
        )  # fmt: skip

    for tier, nbytes, room in (
        ("host", host, hardware.ram_nbytes),
        ("device", device, hardware.device_nbytes),
    ):
        if nbytes is not None and nbytes <= 0:
            return refused(
                f"the {tier} has {format_bytes(room or 0)}, and activations and the framework leave nothing of it for "
                f"pages (activations take {format_bytes(activations)}): a smaller batch or checkpointing takes less"
            )
    # A gradient is read and written where it is copied in RAM.
    landing = hardware.update / 2 if unified else hardware.pcie
    rates = Rates(hardware.flops * hardware.utilisation, hardware.update, landing)
    try:
        draft = _draft(model, training, rates, host, device, bool(hardware.disk_nbytes), drafts)
    except BudgetError as error:
        return refused(str(error), {error.tier: error.smallest} if error.smallest is not None else None)
    table, units, needs, plans = draft
    total = sum(page.nbytes for page in table)
    paging = total > host
    every = training.every
    on_disk = space(table, units, training.commits if every is not None else 0)
    if not paging and every is None:
        on_disk = 0
    if on_disk > hardware.disk_nbytes and every is not None:
        return refused(
            f"training state is {format_bytes(total)}, which takes {format_bytes(on_disk)} on the disk with "
            f'durability.mode = "{training.durability}" and durability.commits = {training.commits}, and the disk has '
            f"{format_bytes(hardware.disk_nbytes)}",
            needs,
        )
    if on_disk > hardware.disk_nbytes:
        return refused(
            f"training state is {format_bytes(total)}, more than the host's budget of {format_bytes(host)}, and the "
            f"disk has {format_bytes(hardware.disk_nbytes)}",
            needs,
        )
    if len(plans) < paging + (not unified):
        return refused("in budgets this small no plan for a step works: give more than the smallest", needs)
    _, seconds = lay_out(units, model.decoder, training, rates)
    sizes = {page.number: page.nbytes for page in table}
    links = {"disk": hardware.disk, "pcie": Link(hardware.pcie, hardware.pcie, 1e-5, hardware.disk.effort)}
    played = {name: (plan, play(plan, sizes, seconds, links[name])) for name, plan in plans.items()}
    moments = [page.nbytes for page in table if page.kind is Kind.EXP_AVG]
    update = sum(moments) / 4 * UPDATE_NBYTES / hardware.update + len(moments) * UPDATE_EFFORT
    # What the links' transfers take of whoever computes comes on top.
    effort = sum(line.compute - sum(seconds) for _, line in played.values())
    compute = sum(seconds) - update
    waits = {name: line.late + line.no_frame for name, (_, line) in played.items()}
    carried: dict[str, int] = {}
    busy = {"compute": compute, "optimizer": update, "transfers": effort}
    state = _state(table)
    for name, (plan, line) in played.items():
        low, high = ("disk", "host") if name == "disk" else ("host", "device")
        carried |= {f"{low} to {high}": plan.loaded}
        if name == "disk":
            carried |= {f"{high} to {low}": plan.written}
        busy[name] = line.link
        for stay in plan.stays:
            if stay.whole:
                page = table[stay.page]
                state[PLACES[page.kind]][f"always on {high}"] += page.nbytes
    if every:
        nbytes = added(units, plans.get("disk")) // every
        carried["host to disk"] = carried.get("host to disk", 0) + nbytes
        waits["commits"] = nbytes / hardware.disk.write
        busy["disk"] = busy.get("disk", 0.0) + waits["commits"]
    if not unified:
        carried["device to host"] = training.accumulation * sum(
            page.nbytes for page in table if page.kind is Kind.GRADIENT
        )
    peak = (
        hardware.process_nbytes + min(host, total) + (activations + gradient if unified else CUDA_HOST_NBYTES)
    )
    if hardware.host_budget is not None and peak > hardware.ram_nbytes:
        return refused(
            f"the process would take {format_bytes(peak)}, of which pages are {format_bytes(min(host, total))} and "
            f"activations {format_bytes(activations)}, and the machine has {format_bytes(hardware.ram_nbytes)}: a "
            "smaller host budget, a smaller batch or checkpointing takes less",
            needs,
        )
    if not paging:
        for places in state.values():
            places["always on host"] = places["nbytes"]
    return Forecast(
        model, hardware, training, True, "", budgets, needs, activations, peak, on_disk, state,
        sum(seconds) + effort + sum(waits.values()), compute, update, effort, waits, carried, busy, len(units),
    )  # fmt: skip


def _draft(
    model: Model,
    training: Training,
    rates: Rates,
    host: int,
    device: int | None,
    sinks: bool,
    drafts: Drafts | None,
) -> Draft:
    key = (
        id(model.net), training.dtype, training.accumulation, training.checkpointing, host, device, sinks
    )  # fmt: skip
    if drafts is not None and key in drafts:
        return drafts[key]
    table, units, needs = _cut(model.net, training.dtype, budget.floor(host), device, sinks)
    total = sum(page.nbytes for page in table)
    plans: dict[str, Plan] = {}
    if sinks or total <= host:
        schedule, seconds = lay_out(units, model.decoder, training, rates)
        plans = _plans(table, units[0], schedule, seconds, min(host, total), device, total > host)
    draft = Draft(table, units, needs, plans)
    if drafts is not None:
        drafts[key] = draft
    return draft


def _cut(
    net: nn.Module, dtype: torch.dtype, host: int, device: int | None, sinks: bool
) -> tuple[PageTable, list[Unit], dict[str, int]]:
    """As :class:`tiermem.runtime.Runtime` cuts a model, with larger parts where there would be very many pages."""
    sinking = dict.fromkeys(Kind, sinks)

    def build(modules: dict[str, nn.Module], numel: int) -> tuple[PageTable, list[Unit]]:
        table = PageTable()
        units = build_units(
            net,
            modules,
            table,
            dtype=dtype,
            device=torch.device("cpu"),
            part_numel=numel,
            sinks=sinking,
            meta=True,
        )
        return table, units

    best = min(host, host if device is None else device) // 6
    found = budget.fit(
        ways_to_cut(net, (), best), build, host, None if device is None else budget.floor(device), (0, 0)
    )
    needs = {"host": found.host.nbytes} | ({} if found.device is None else {"device": found.device.nbytes})
    table, units = found.table, found.units
    count = sum(len(group.parts) for unit in units for group in unit.groups)
    if count > MAX_PARTS and count > 2 * len(units):
        elements = sum(group.numel for unit in units for group in unit.groups)
        numel = min(elements // MAX_PARTS, host // 384)  # as part_numel, without its largest part
        if numel > part_numel(host):
            table, units = build({unit.name: unit.module for unit in units[1:]}, numel)
    return table, units, needs


def _plans(
    table: PageTable,
    resident: Unit,
    schedule: Schedule,
    seconds: Sequence[float],
    host: int,
    device: int | None,
    on_disk: bool,
) -> dict[str, Plan]:
    """The plan of each link that carries anything: "disk", "pcie"."""
    parameters = {page.number: page.nbytes for page in resident.pages}
    gradients = {page.number: page.nbytes for page in resident.gradient_pages}
    upper = None
    if device is not None:
        whole = sum(page.nbytes for page in table if page.kind is Kind.PARAMETER)
        upper = _area("device", min(device, whole), parameters)
    lower = _area("host", host, gradients if device is not None else parameters | gradients)
    if upper is None and not on_disk:
        return {}
    plans = Plans(table, lower, upper, Ahead()).of(schedule, seconds)
    links = (("disk", lower if on_disk else None), ("pcie", upper))
    return {name: plans[area.tier] for name, area in links if area is not None and area.tier in plans}


def _area(name: str, nbytes: int, homes: dict[int, int]) -> Area:
    """What plans may use of a tier that has no memory: only its name counts."""
    tier = Tier(name, torch.empty(0, dtype=torch.uint8), eviction("plan"))
    return Area(tier, budget.floor(nbytes) - sum(homes.values()), frozenset(homes))


def _state(table: PageTable) -> dict[str, dict[str, int]]:
    state = {name: {"nbytes": 0, "always on device": 0, "always on host": 0} for name in PLACES.values()}
    for page in table:
        state[PLACES[page.kind]]["nbytes"] += page.nbytes
    return state


def _largest(net: nn.Module) -> int:
    return max((parameter.numel() for parameter in net.parameters()), default=0)
