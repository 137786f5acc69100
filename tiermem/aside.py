"""Aside: the gradients of earlier backwards, kept apart while one backward adds up several uses of a parameter.

Autograd adds up what the uses of a parameter contribute, and adds the sum to what there is. Tiles of a tied weight get
each contribution as it comes, so what there is goes aside at the first one, and is added at the end: the same sums, in
the same order. It has a page of its own, which comes into being when it is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import torch

from tiermem.hooks import Hooks
from tiermem.page import Kind, Page
from tiermem.policies import Phase
from tiermem.trace import Event
from tiermem.unit import Group


class Aside:
    """For the tiles of one parameter, whose ``groups`` have one field each."""

    def __init__(self, groups: Sequence[Group], hooks: Hooks) -> None:
        self._groups = groups
        self._hooks = hooks
        self._pages: dict[Group, Page] = {}
        self._backward = -1  # the last one that contributed
        self._begun: set[Group] = set()  # groups with contributions of it

    def begin(self, group: Group) -> None:
        """This backward is about to contribute to a group's gradient. No page of the group need be pinned."""
        number: int = torch._C._current_graph_task_id()
        if number != self._backward:
            self._add()  # what one that was broken off left
            self._begun.clear()
            self._backward = number
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._add)
        if group in self._begun:
            return
        self._begun.add(group)
        if not group.landed[0]:
            return
        page = self._page(group)
        with self._hooks.gradients.resident(group, 0) as gradient:
            self._pin([], overwrite=[page])
            try:
                self._view(group, page).copy_(gradient)
            finally:
                self._unpin(page)
        group.aside = page
        group.landed[0] = group.held[0] = 0

    def _add(self) -> None:
        """The backward is over: its sums are added to what is aside."""
        waiting = [group for group in self._groups if group.aside is not None]
        if waiting:
            self._hooks.leave_backward()
        for group in waiting:
            page, group.aside = group.aside, None
            assert page is not None
            self._pin([page])
            try:
                with torch.no_grad():
                    self._hooks.gradients.land(group, 0, self._view(group, page))
            finally:
                self._unpin(page)
            with self._hooks.door:
                self._hooks.pager.discard(page)

    def _page(self, group: Group) -> Page:
        page = self._pages.get(group)
        if page is None:
            hooks, gradient = self._hooks, group.gradient
            assert gradient is not None
            page = hooks.pager.table.add(
                group.unit, Kind.GRADIENT, group.dtype, group.numel, sinks=gradient.sinks
            )
            with hooks.door:
                if hooks.pager.transfers.disk is not None:
                    hooks.pager.transfers.provide([page])
                hooks.trace.record(Event.PAGE, now(), 0, group.unit, page.number, page.nbytes)
            self._pages[group] = page
        return page

    def _view(self, group: Group, page: Page) -> torch.Tensor:
        assert page.host is not None
        field = group.fields[0]
        return self._hooks.pager.host.view(page.host, group.dtype, field.offset, field.size, field.stride)

    def _pin(self, pages: Sequence[Page], overwrite: Sequence[Page] = ()) -> None:
        with self._hooks.door:
            self._hooks.pager.fault(pages, Phase.BACKWARD, self._groups[0].unit, overwrite=overwrite)

    def _unpin(self, page: Page) -> None:
        with self._hooks.door:
            self._hooks.pager.unpin([page], dirty=True)
