"""An update: what an optimizer keeps of one wrapped model, and its step over that model's pages, unit by unit.

An update that an error breaks off leaves every page whole and readable: the state of what came before the error is
updated, that of the rest is not. A step that raised is between two steps: go on from a saved state, not by calling it
again, which would update the first pages twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import PagingError
from tiermem.gradients import given_up
from tiermem.hooks import Hooks
from tiermem.page import Page
from tiermem.tier import trim_memory
from tiermem.unit import Group, Unit


class Update:
    """What one optimizer keeps of one wrapped model.

    ``settings``: id of a parameter -> its parameter group's number.
    """

    def __init__(self, hooks: Hooks, owner: Optimizer) -> None:
        self.hooks = hooks
        self._owner = weakref.ref(owner)
        self.settings: dict[int, int] = {}
        self.early_groups: set[Group] = (
            set()
        )  # that were updated before the step, which leaves them as they are
        self._begun = False

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """These parameters are updated with the settings of parameter group number ``setting``."""
        for parameter in parameters:
            self.settings[id(parameter)] = setting

    def pending(self) -> bool:
        """Are there gradients of these parameters that have landed and weren't used?"""
        return any(
            group.landed[index] and not group.used[index] and id(field.parameter) in self.settings
            for unit in self.hooks.units
            for group in unit.groups
            if group.gradient is not None and not group.summed.spent
            for index, field in enumerate(group.fields)
        )

    def names(self) -> dict[int, str]:
        """The names of its parameters, by their ids."""
        homes = {number: self.hooks.home[number] for number in self.settings}
        return {number: group.fields[index].name for number, (group, index) in homes.items()}

    def reader(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """What gives the state of one parameter, in tensors of their own; {} before its first update."""
        raise NotImplementedError

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over the state of one parameter from what a reader or an unpaged optimizer gave."""
        raise NotImplementedError

    def _run(self, update: Callable[[Unit, Group], None]) -> None:
        """A step: ``update`` each group that has gradients.

        Raises TransferError, naming the page, when the disk fails.
        """
        hooks = self.hooks
        other = hooks.reduction.local
        if isinstance(other, Update) and other.owner is None:
            hooks.reduction.local = other = None  # with its optimizer
        if other not in (None, self):
            raise PagingError(
                "another optimizer of this model is a OneBitAdam whose warm-up is over: gradients are each rank's own "
                "since, and nobody else's; give it all parameters that are trained"
            )
        self._begin()
        with self._broken_off():
            with hooks.door:
                hooks.release_resident()
            commits = hooks.commits
            said = hooks.reduction.begin_step(commits.told() if commits is not None else None)
            if commits is not None:
                commits.agree(said)
            if hooks.pager.transfers.disk is not None:
                # What autograd freed lies between what is kept, and would be kept too: a tenth of the peak and more.
                trim_memory()
            for unit in hooks.units:
                for group in unit.groups:
                    if group.trainable and any(group.landed) and group not in self.early_groups:
                        self._require_gradients(group)
                        with hooks.door.hold():
                            update(unit, group)
            self.early_groups.clear()
            with hooks.door:
                hooks.reduction.end_step()
                hooks.steps.end_step()
                hooks.pager.pump()  # what the next step wants first can be on its way before it begins
        self._begun = False
        if hooks.commits is not None:
            hooks.commits.end_update()

    def _require_gradients(self, group: Group) -> None:
        """Raise PagingError where the gradients have been used by a step, and dropped."""
        if group.summed.spent and group.summed.blank:
            mine = [each.name for each in group.fields if id(each.parameter) in self.settings]
            if mine:
                raise given_up(mine[0])

    def _begin(self) -> None:
        """The step's first update is about to be made."""
        if not self._begun and self.hooks.commits is not None:
            self.hooks.commits.begin_update()
        self._begun = True

    @contextmanager
    def _broken_off(self) -> Iterator[None]:
        """After an error inside, the step isn't one that goes on: who calls it again begins, and is told so."""
        try:
            yield
        except BaseException:
            self._begun = False
            raise

    def _send(self, pages: Sequence[Page]) -> None:
        """Begin to write pages that the commit of this step waits for; under the door."""
        commits = self.hooks.commits
        if commits is not None and commits.writing:
            self.hooks.pager.writeback(pages)

    @property
    def owner(self) -> Optimizer | None:
        """The optimizer; None when it is gone."""
        return self._owner()

    def _owned(self) -> Optimizer:
        owner = self._owner()
        assert owner is not None
        return owner
