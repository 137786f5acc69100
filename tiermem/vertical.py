"""Vertical accumulation: all micro-batches of a step go through one link of a chain before any goes through the next.

So parameters are paged once in forward and once in backward, however many micro-batches there are. What is kept between
the two is what goes from link to link; links run again in backward, one micro-batch at a time.

Note: the order of backward. Autograd takes what was made last first. Forward takes micro-batches from the last to the
first, so backward takes them from the first to the last within each link, and adds up their gradients in that order,
which is that of one backward after the other: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem.errors import ConfigError, PagingError
from tiermem.hooks import Hooks

Link = Callable[[Any], Any]
"""Takes what the one before it returns: a module, or any function of modules."""

Batch = tuple[Any, Any]
"""What the first link takes, and what the loss is told beside the last one's output."""


def checked(batches: Iterable[Batch], accumulation: str) -> list[Batch]:
    """The micro-batches. Raises ConfigError where there are none, and for another ``accumulation``."""
    if accumulation not in ("vertical", "horizontal"):
        raise ConfigError(f'accumulation: read {accumulation!r}; allowed are "vertical" and "horizontal"')
    given = list(batches)
    if not given:
        raise ConfigError("accumulate(): there are no micro-batches")
    return given


def links_of(net: nn.Module, chain: Iterable[Link] | None) -> list[Link]:
    """What ``net`` calls one after the other. Raises ConfigError where that can't be seen."""
    if chain is None and not isinstance(net, nn.Sequential):
        raise ConfigError(
            f'accumulation = "vertical": a {type(net).__name__} isn\'t a chain that can be seen, as nn.Sequential is; '
            "give chain=[...], the modules or functions that it calls one after the other, each with what the one "
            'before it returned, or use accumulation="horizontal"'
        )
    links: list[Link] = list(chain if chain is not None else net)  # type: ignore[arg-type]
    if not links or not all(map(callable, links)):
        names = [type(link).__name__ for link in links]
        raise ConfigError(f"chain: read {names}; allowed are modules and functions, at least one")
    return links


def compare(hooks: Hooks, links: Sequence[Link], first: Any) -> None:
    """Raise ConfigError unless the links make of ``first`` what the model makes of it; both are asked in eval mode."""
    net = hooks.net
    modes = [(module, module.training) for module in net.modules()]
    try:
        net.eval()
        with torch.no_grad():
            expected = net(first)
            found = first
            with hooks.passing():
                for link in links:
                    found = link(found)
    finally:
        for module, training in modes:
            module.training = training
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        same, how = type(found) is type(expected), f"a {type(found).__name__} and a {type(expected).__name__}"
    else:
        same = found.shape == expected.shape and torch.equal(found, expected)
        how = f"tensors of shapes {list(found.shape)} and {list(expected.shape)}"
        if found.shape == expected.shape:
            how += f", which differ by up to {float((found - expected).abs().max()):.3g}"
    if not same:
        raise ConfigError(
            f"chain: its {len(links)} links and the model's own forward make {how} of the first micro-batch: they "
            'must be what the forward calls, one after the other; or use accumulation="horizontal"'
        )


def accumulate(
    hooks: Hooks, links: Sequence[Link], batches: Sequence[Batch], loss_fn: Callable[[Any, Any], torch.Tensor]
) -> list[torch.Tensor]:
    """Add up the gradients of all losses; returns these, in the order of ``batches``."""
    if hooks.running:
        raise PagingError("accumulate() can't be called in the middle of a forward or backward")
    *inner, last = links

    def finish(value: Any, target: Any) -> torch.Tensor:
        return loss_fn(last(value), target)

    values = [value for value, _ in batches]
    order = range(len(batches) - 1, -1, -1)
    losses = [torch.empty(0)] * len(batches)
    with torch.enable_grad():
        with hooks.passing():
            for link in inner:
                for index in order:
                    values[index] = checkpoint(link, values[index], use_reentrant=False)
            for index in order:
                losses[index] = checkpoint(finish, values[index], batches[index][1], use_reentrant=False)
        values.clear()
        torch.autograd.backward(losses)
    return [loss.detach() for loss in losses]


def horizontal(
    model: nn.Module, batches: Sequence[Batch], loss_fn: Callable[[Any, Any], torch.Tensor], no_sync: Any
) -> list[torch.Tensor]:
    """The same, one micro-batch after the other through the whole model."""
    losses = []
    for index, (value, target) in enumerate(batches):
        if index < len(batches) - 1:
            with no_sync():
                loss = loss_fn(model(value), target)
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = loss_fn(model(value), target)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses
