"""Runs: what of a page is updated by one call of the kernel, and how often each parameter was updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiermem.unit import Group, Unit


@dataclass(slots=True)
class Run:
    """Neighbouring elements of a page with the same settings and the same count of updates."""

    start: int
    stop: int
    setting: int
    step: int
    fields: tuple[int, ...]


class Runs:
    """The runs of all groups, made anew where other gradients have landed than the last time.

    ``settings`` and ``steps`` are by the id of a parameter: the number of its parameter group, and the updates it has
    had, which are counted in the runs until they are settled.
    """

    def __init__(self, units: Sequence[Unit], settings: Mapping[int, int], steps: dict[int, int]) -> None:
        self._units = units
        self._settings = settings
        self._steps = steps
        self._known: dict[int, tuple[bytes, list[Run]]] = {}  # id of a Group -> (what had landed, its runs)

    def of(self, group: Group, landed: bytes) -> list[Run]:
        """Those of the fields that have landed, of parameters that have settings."""
        known = self._known.get(id(group))
        if known is not None and known[0] == landed:
            return known[1]
        self._settle(group)
        runs: list[Run] = []
        for index, field in enumerate(group.fields):
            setting = self._settings.get(id(field.parameter))
            if setting is None or not landed[index]:
                continue
            step = self._steps[id(field.parameter)]
            stop = field.offset + field.numel
            last = runs[-1] if runs else None
            if last and last.fields[-1] == index - 1 and (last.setting, last.step) == (setting, step):
                # What lies between two tensors is zeros in every page, and zeros stay zeros.
                runs[-1] = Run(last.start, stop, setting, step, (*last.fields, index))
            else:
                runs.append(Run(field.offset, stop, setting, step, (index,)))
        self._known[id(group)] = (landed, runs)
        return runs

    def settle_all(self) -> None:
        """Write what the runs counted back to the single parameters."""
        for unit in self._units:
            for group in unit.groups:
                self._settle(group)

    def clear(self) -> None:
        """Forget them: settings or counts have been changed."""
        self._known.clear()

    def _settle(self, group: Group) -> None:
        known = self._known.pop(id(group), None)
        for run in known[1] if known else ():
            for index in run.fields:
                self._steps[id(group.fields[index].parameter)] = run.step
