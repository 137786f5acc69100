"""The schedule of a step that has never run: the accesses that forward, backward and the optimizer would record.

Units are taken to run in the order of the module tree, each once in a pass, which is what decoders do.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tiermem.planner.model import Decoder
from tiermem.planner.shape import Training, attention_flop, forward_flop
from tiermem.policies import Access, Effect, Phase, Recorder, Schedule
from tiermem.unit import Unit

UPDATE_NBYTES = 28
"""What Adam reads and writes for each element, float32 or bfloat16 with master weights alike (see trainer.adam)."""
UPDATE_EFFORT = 1.2e-4
"""Seconds that each part's update takes besides its arithmetic, found in traces of runs on Zen 3 (60 to 200 us)."""


class Rates:
    """How fast the arithmetic goes: FLOP per second of modules, bytes per second of the optimizer's update, and of the
    copy that takes gradients to their pages.
    """

    def __init__(self, flops: float, update: float, gradients: float) -> None:
        self.flops = flops
        self.update = update
        self.gradients = gradients


def lay_out(
    units: Sequence[Unit], shape: Decoder, training: Training, rates: Rates
) -> tuple[Schedule, list[float]]:
    """A step's schedule in the steady state, and the seconds that each access computes."""
    recorder = Recorder()
    seconds: list[float] = []
    forward = _forward_flop(units, shape, training)
    paged = units[1:]
    nests = {unit.number: [unit, *(units[number] for number in sorted(unit.outer))] for unit in paged}
    blocks = _blocks(paged)
    for number in range(training.accumulation):
        for unit in paged:
            pages = [page.number for each in nests[unit.number] for page in each.pages]
            recorder.record(Access(unit.number, Phase.FORWARD), pages)
            seconds.append(forward[unit.number] / rates.flops)
        for unit in reversed(paged):
            if training.checkpointing and unit.number in blocks:
                pages = [page.number for each in nests[unit.number] for page in each.pages]
                recorder.record(Access(unit.number, Phase.FORWARD), pages)
                seconds.append(forward[unit.number] / rates.flops)
            pages, effects = [], []
            for each in nests[unit.number]:
                fresh = number == 0 and each is unit
                pages += [page.number for page in each.pages + each.gradient_pages]
                effects += [Effect.NONE] * len(each.pages)
                effects += [Effect.WRITES | Effect.FRESH if fresh else Effect.WRITES] * len(
                    each.gradient_pages
                )
            recorder.record(Access(unit.number, Phase.BACKWARD), pages, effects)
            copied = sum(page.nbytes for page in unit.gradient_pages)
            seconds.append(2 * forward[unit.number] / rates.flops + copied / rates.gradients)
    _optimizer(units, recorder, seconds, rates)
    return recorder.finish(), seconds


def _optimizer(units: Sequence[Unit], recorder: Recorder, seconds: list[float], rates: Rates) -> None:
    for unit in units:
        number = 0
        for group in unit.groups:
            if group.gradient is None:
                continue
            for index, part in enumerate(group.parts):
                last = index == len(group.parts) - 1
                # With master weights the parameters are written and not read.
                first = part.master is not None and index == 0
                recorder.record(
                    Access(unit.number, Phase.OPTIMIZER, number + index),
                    [page.number for page in (*part.pages, group.gradient, group.parameter)],
                    [Effect.WRITES] * len(part.pages)
                    + [Effect.SPENDS if last else Effect.NONE]
                    + [Effect.WRITES | Effect.FRESH if first else Effect.WRITES],
                )
                seconds.append((part.stop - part.start) * UPDATE_NBYTES / rates.update + UPDATE_EFFORT)
            number += len(group.parts)


def _blocks(paged: Sequence[Unit]) -> set[int]:
    """The numbers of the units that are layers, or parts of layers: everything but embeddings and heads."""
    return {unit.number for unit in paged if not isinstance(unit.module, nn.Embedding | nn.Linear)}


def _forward_flop(units: Sequence[Unit], shape: Decoder, training: Training) -> dict[int, float]:
    """FLOP of each unit's forward; what the resident unit does is the last one's, which runs beside it."""
    inside = {id(unit.module) for unit in units[1:]}
    found = {
        unit.number: forward_flop(_matrix_elements(unit.module, inside, True), training) for unit in units
    }
    blocks = _blocks(units[1:])
    total = sum(found[number] for number in blocks)
    attention = shape.layers * attention_flop(shape, training)
    for number in blocks:
        found[number] += attention * (found[number] / total if total else 1 / len(blocks))
    resident = found.pop(0)
    if len(units) > 1:
        found[units[-1].number] += resident + (0.0 if blocks else attention)
    return found


def _matrix_elements(module: nn.Module, units: set[int], first: bool = False) -> int:
    """Elements of the matrices that a unit multiplies with: no embedding is one, a tied head is."""
    if not first and id(module) in units:
        return 0
    own = 0
    if not isinstance(module, nn.Embedding):
        own = sum(each.numel() for each in module.parameters(recurse=False) if each.ndim >= 2)
    return own + sum(_matrix_elements(child, units) for child in module.children())
