"""What commits have of an optimizer: its groups' settings, how often each parameter was updated, what isn't in pages.

``names`` are those of the parameters that have pages, by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import ConfigError


def state_of(
    optimizer: Optimizer, names: Mapping[int, str], steps: Mapping[int, int], kind: str | None = None
) -> dict[str, Any]:
    """As tensors and plain data. State of parameters without pages is there as (group, index in it, state).

    ``kind``: the name of the class whose state it is; None for ours.
    """
    return {
        "kind": kind,
        "groups": [
            {
                "settings": {key: value for key, value in group.items() if key != "params"},
                "parameters": parameters,
            }
            for group, parameters in _named_groups(optimizer, names)
        ],
        "steps": {names[number]: step for number, step in steps.items()},
        "others": [
            (number, index, optimizer.state[p])
            for number, group in enumerate(optimizer.param_groups)
            for index, p in enumerate(group["params"])
            if id(p) not in names and optimizer.state.get(p)
        ],
    }


def resume(
    optimizer: Optimizer,
    names: Mapping[int, str],
    steps: dict[int, int],
    states: Sequence[dict[str, Any]],
    kind: str | None = None,
) -> None:
    """Give an optimizer back what :func:`state_of` gave, of one optimizer or several; ``steps`` is written.

    Raises ConfigError when it is of another ``kind``, or parameters with pages are grouped otherwise than they were.
    """
    mine = set(names.values())
    own = [
        state
        for state in states
        if any(not mine.isdisjoint(group["parameters"]) for group in state["groups"])
    ]
    for state in own:
        if state.get("kind") != kind:
            raise ConfigError(
                f"the resumed commit has the state of {_named(state.get('kind'))}, and this is {_named(kind)}: make "
                "the optimizer of that class, or begin afresh with resume=None"
            )
    known = {tuple(each["parameters"]): each["settings"] for state in states for each in state["groups"]}
    for group, parameters in _named_groups(optimizer, names):
        if not parameters:
            continue
        if tuple(parameters) not in known:
            there = "; ".join(_shortened(each) for each in known if each)
            raise ConfigError(
                f"the optimizer has a parameter group of {_shortened(parameters)}; those of the resumed commit are of "
                f"{there}: make it with the same groups, in the same order"
            )
        for key, value in known[tuple(parameters)].items():
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = value
    for state in own:
        counts = {number: state["steps"].get(names[number]) for number in steps}
        steps.update({number: count for number, count in counts.items() if count is not None})
        _resume_others(optimizer, state["others"])


def _named(kind: str | None) -> str:
    return "tiermem's Adam or AdamW" if kind is None else kind


def _resume_others(optimizer: Optimizer, others: Sequence[tuple[int, int, dict[str, Any]]]) -> None:
    groups = optimizer.param_groups
    for number, index, values in others:
        if number < len(groups) and index < len(groups[number]["params"]):
            p = groups[number]["params"][index]
            optimizer.state[p] = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }


def _named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[dict[str, Any], list[str]]]:
    """The groups, each with the names of its parameters that have pages."""
    return [
        (group, [names[id(p)] for p in group["params"] if id(p) in names]) for group in optimizer.param_groups
    ]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
