"""The run folders on a path, as ``tiermem doctor`` finds and clears them."""

import os
from pathlib import Path
from typing import Any

from tiermem.checkpoint import folder as checkpoints
from tiermem.cli.machine import Finding, Verdict
from tiermem.durable import DurableRun, remove_unborn, share_of
from tiermem.errors import ConfigError, format_bytes
from tiermem.folder import Found, find, reclaim


def run_folders(folder: Path, removed: list[str]) -> Finding:
    """Which runs have files there, and what becomes of these; ``removed`` are the names of those that are gone now."""
    runs = [_figures(each) for each in find(folder)]
    runs += [
        {
            "name": path.name,
            "state": "dead",
            "says": "a checkpoint that was never finished",
            "step": None,
            "nbytes": _nbytes(path),
        }
        for path in checkpoints.dead(folder)
    ]
    dead = [run for run in runs if run["state"] == "dead"]
    words = [f"{run['name']}: {run['says']}, {format_bytes(run['nbytes'])}" for run in runs]
    words += [f"{name}: removed" for name in removed]
    nbytes = sum(run["nbytes"] for run in dead)
    consequence = "each new run takes a folder of its own; durable ones stay until you remove them"
    if dead:
        consequence = (
            f"{len(dead)} of runs that died hold {format_bytes(nbytes)}: the next run on this path, or save to it, "
            "removes them, or tiermem doctor --clear"
        )
    return Finding(
        "runs",
        Verdict.SLOWER if dead else Verdict.GOOD,
        "; ".join(words) or f"none in {folder}",
        consequence,
        {"runs": runs, "removed": removed},
    )


def clear_dead(folder: Path) -> list[str]:
    """Remove what runs that died left, durable ones that never committed, and checkpoints that weren't finished.

    Returns the folders' names.
    """
    removed = reclaim(folder) + checkpoints.remove_dead(folder)
    for found in find(folder):
        if found.kind == "durable" and not found.alive:
            if remove_unborn(found.path, [folder]):
                removed.append(found.path.name)
                continue
            if share_of(found.path.name) is not None:
                continue  # whether all ranks have committed nothing, the ranks find out together
            run = _open(found.path)
            if run is None:
                continue
            if run.empty and run.remove():
                removed.append(found.path.name)
            run.let_go()
    return removed


def _figures(found: Found) -> dict[str, Any]:
    state, says, step = "dead", "left by a run that died", None
    if found.alive:
        state, says = "alive", f"{found.kind}, in use"
    elif found.kind == "kept":
        state, says = "kept", "kept at close, as [disk] keep asked"
    elif found.kind == "durable":
        run = _open(found.path)
        if run is None:
            state, says = "unreadable", "durable, and tiermem verify says what is wrong with it"
        else:
            if not run.empty:
                step = max((commit.step for commit in run.commits()), default=None)
                state, says = "durable", f"durable, at step {step}"
            run.let_go()
    return {
        "name": found.path.name,
        "state": state,
        "says": says,
        "step": step,
        "nbytes": _nbytes(found.path),
    }


def _open(path: Path) -> DurableRun | None:
    try:
        return DurableRun.open(path)
    except ConfigError:
        return None


def _nbytes(path: Path) -> int:
    """Bytes of all files below."""
    return sum(
        os.stat(os.path.join(parent, name), follow_symlinks=False).st_blocks * 512
        for parent, _, names in os.walk(path)
        for name in names
    )
