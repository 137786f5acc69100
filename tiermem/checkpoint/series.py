"""A series of checkpoints in one folder: the newest are kept, and every so many steps one for good."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.checkpoint.document import DOCUMENT
from tiermem.checkpoint.folder import PARTIAL
from tiermem.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from tiermem.checkpoint.saves import Saves
    from tiermem.checkpoint.saving import Saving

NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The folders ``step-N`` in ``folder``, and which of them are kept.

    Args:
        folder: is made when the first one is saved.
        keep_last: how many of the newest are kept, from 1 up; None for all.
        keep_every: those of steps that are a multiple of it are kept, however old; None for none.

    A checkpoint is removed only after a newer one has been published, so there is always a whole one.
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep_last: int | None = 3, keep_every: int | None = None
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name}: read {value}; allowed is a number from 1 up, or None")
        self.folder = Path(folder).expanduser()
        self.keep_last = keep_last
        self.keep_every = keep_every

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order."""
        found = []
        if self.folder.is_dir():
            for each in self.folder.iterdir():
                match = NAME.fullmatch(each.name)
                if match and not each.is_symlink() and (each / DOCUMENT).is_file():
                    found.append(int(match[1]))
        return sorted(found)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:08}"

    def latest(self) -> Path | None:
        """The newest one; None when there is none yet."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, model: Any, optimizer: Optimizer | None = None, *, step: int, **options: Any) -> Saving:
        """``model.save`` of a :class:`tiermem.TieredModule` under the step's name; then what isn't kept goes.

        ``options``: as ``model.save`` has them. A checkpoint of this step that is there is replaced.
        """
        saves: Saves = model._saves
        return saves.save(
            self.path(step), optimizer, step=step, after=self.prune, **{"overwrite": True, **options}
        )

    def doomed(self) -> list[int]:
        """The steps whose checkpoints :meth:`prune` would remove."""
        steps = self.steps()
        last = set(steps if self.keep_last is None else steps[-self.keep_last :])
        return [
            step
            for step in steps
            if step not in last and not (self.keep_every and step % self.keep_every == 0)
        ]

    def prune(self) -> list[int]:
        """Remove what isn't kept; returns the steps. What is being removed has another name first, so is never half."""
        removed = []
        for step in self.doomed():
            path = self.path(step)
            aside = self.folder / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
            try:
                os.rename(path, aside)
                shutil.rmtree(aside)
            except OSError as error:
                raise CheckpointError(f"{path} can't be removed: {error.strerror}") from error
            removed.append(step)
        return removed
