"""The arithmetic of 1-bit Adam on a part's elements: momenta, their sum, and the update of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tiermem.trainer.kernel import Hyper
from tiermem.trainer.runs import Run
from tiermem.trainer.signs import Active, Space, spans, unpack


class Piece(NamedTuple):
    """Elements of a part, counted from its first, that one run has; ``start`` is the part's, in the group."""

    low: int
    high: int
    run: Run
    hyper: Hyper


class Tensors(NamedTuple):
    """A part's elements, flat: ``values`` (float32) are the masters, or the parameters themselves."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    values: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def active_of(exp_avg_sq: torch.Tensor, pieces: Sequence[Piece]) -> Active:
    """Elements that have gradients, and a second moment to divide by."""

    def active(start: int, stop: int) -> torch.Tensor:
        mask = torch.zeros(stop - start, dtype=torch.bool)
        for piece in pieces:
            low, high = max(piece.low, start), min(piece.high, stop)
            if low < high:
                mask[low - start : high - start] = exp_avg_sq[low:high] > 0
        return mask

    return active


def shifted(active: Active, first: int) -> Active:
    """The same, counted from element ``first``."""
    return lambda start, stop: active(first + start, first + stop)


def add_momentum(tensors: Tensors, worker: torch.Tensor, piece: Piece, active: Active, factor: float) -> None:
    """This rank's momentum, onto the errors that it has."""
    hyper = piece.hyper
    for low, high in spans(piece.low, piece.high):
        gradient = tensors.gradient[low:high].to(torch.float32) * (-factor if hyper.maximize else factor)
        if hyper.weight_decay and not hyper.decoupled:
            gradient.add_(tensors.values[low:high], alpha=hyper.weight_decay)
        momentum = tensors.exp_avg[low:high] * hyper.beta1 + gradient * (1 - hyper.beta1)
        place = worker[low:high]
        torch.where(active(low, high), place + momentum, place, out=place)


def add_up(space: Space, count: int, active: Active) -> None:
    """The mean of what came from all ranks, in their order, onto the errors of the sum."""
    world = len(space.incoming)
    for start, stop in spans(0, count):
        mean = torch.zeros(stop - start)
        for row in space.incoming:
            mean.add_(unpack(row, start, stop), alpha=1 / world)
        place = space.server[start:stop]
        torch.where(active(start, stop), place + mean, place, out=place)


def take_over(exp_avg: torch.Tensor, row: torch.Tensor, active: Active) -> None:
    """The momentum of a slice is what its rank made of all."""
    for start, stop in spans(0, exp_avg.numel()):
        place = exp_avg[start:stop]
        torch.where(active(start, stop), unpack(row, start, stop), place, out=place)


def update(tensors: Tensors, piece: Piece, active: Active, warmup_steps: int) -> None:
    """Update the parameters of a piece from its momentum, by the second moments of the warm-up."""
    hyper, step = piece.hyper, piece.run.step
    correction = (1 - hyper.beta2 ** min(step, warmup_steps)) ** 0.5
    size = hyper.lr / (1 - hyper.beta1**step)
    for low, high in spans(piece.low, piece.high):
        values = tensors.values[low:high]
        if hyper.weight_decay and hyper.decoupled:
            values.mul_(1 - hyper.lr * hyper.weight_decay)
        below = tensors.exp_avg_sq[low:high].sqrt().div_(correction).add_(hyper.eps)
        way = torch.where(active(low, high), tensors.exp_avg[low:high] / below, 0.0)
        values.add_(way, alpha=-size)
        if tensors.values is not tensors.parameter:
            tensors.parameter[low:high].copy_(values)
