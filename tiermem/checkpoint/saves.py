"""The saves of one wrapped model: what its ``save`` and ``load`` do, and the one save that may be under way."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem.checkpoint.contents import Contents, OptimizerContents, has_master
from tiermem.checkpoint.document import COMPRESSIONS, jsonable
from tiermem.checkpoint.formats import open_source
from tiermem.checkpoint.inventory import CHUNK_NBYTES, Inventory, Published, Settings
from tiermem.checkpoint.loading import Loaded, Loading
from tiermem.checkpoint.meeting import Meeting
from tiermem.checkpoint.saving import Saving
from tiermem.checkpoint.source import ZarrSource
from tiermem.errors import CheckpointError, TiermemError
from tiermem.runtime import Runtime


class Saves:
    """Saves and loads ``net``, whose pages ``runtime`` has until it is closed.

    ``latest`` is the last save that was begun. What a published checkpoint has of parameters that don't change is kept
    in mind, so that the next one can share its files.
    """

    def __init__(self, net: nn.Module, runtime: Runtime) -> None:
        self.latest: Saving | None = None
        self._net = net
        self._runtime = runtime
        self._published: Published | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Optimizer | None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        overwrite: bool = False,
        compression: str = "none",
        chunk_nbytes: int = CHUNK_NBYTES,
        only: Callable[[str], bool] | None = None,
        after: Callable[[], Any] | None = None,
    ) -> Saving:
        """See ``TieredModule.save``; ``after`` is called when the checkpoint has been published."""
        settings = Settings(overwrite, compression, chunk_nbytes)
        if settings.compression not in COMPRESSIONS:
            raise CheckpointError(
                f"compression: read {settings.compression!r}; allowed is one of {', '.join(COMPRESSIONS)}"
            )
        if settings.chunk_nbytes < 1:
            raise CheckpointError(
                f"chunk_nbytes: read {settings.chunk_nbytes}; allowed is a number of bytes from 1 up"
            )
        self._finish()
        paged = not self._runtime.closed
        if background and not paged:
            raise CheckpointError(
                "background=True: the model has been closed, and what is saved in the background is pages; save "
                "without it"
            )
        contents = Contents(self._net, self._runtime)
        state = OptimizerContents(optimizer, contents) if optimizer is not None else None
        if step is None:
            # Pages count the updates of each parameter, and a run that was resumed counts on from them.
            step = max([self._runtime.steps.number, *(state.updates.values() if state is not None else ())])
        attributes: dict[str, Any] = {"step": step, "extra": jsonable(dict(extra or {}), "extra")}
        if paged:
            attributes["policy"] = self._runtime.config.to_toml()
        parallel = self._runtime.parallel
        if paged and parallel:
            parallel.require_folders(Path(os.path.abspath(path)))
            attributes["parallel"] = parallel.place
        if only is not None:
            contents.keep(only)
        ranks = self._runtime.ranks if paged else None
        if ranks is not None and (background or compression != "none"):
            raise CheckpointError(
                f"{ranks.world} ranks share the model, and write their slices of an array's files together, which "
                "can't be compressed or done in the background: save without background= and compression="
            )
        meeting = Meeting(ranks, f"the checkpoint {path}")
        with meeting:
            updates = state.updates if state is not None else {}
            meeting.fact = [
                name
                for name, places in contents.paged.items()
                if any(has_master(place, updates.get(name, 0)) for place in places)
            ]
        # A rank knows of those that its slices are of.
        masters = {name for names in meeting.facts for name in names}
        base = self._published if ranks is None else None
        inventory = Inventory(contents, state, attributes, settings, base, masters)
        saving = Saving(path, inventory, self._runtime if paged else None, after)
        self.latest = saving
        if background:
            self._runtime.pager.watcher = saving
            saving.start()
        else:
            saving.run()
            self._finish()
        return saving

    def load(
        self, path: str | os.PathLike[str], optimizer: Optimizer | None, *, strict: bool, cast: bool
    ) -> Loaded:
        """See ``TieredModule.load``."""
        self._finish()
        contents = Contents(self._net, self._runtime)
        runtime = None if self._runtime.closed else self._runtime
        ranks = runtime.ranks if runtime is not None else None
        meeting = Meeting(ranks, f"loading {path}")
        with meeting, contextlib.ExitStack() as stack:
            source = open_source(Path(path))
            stack.callback(source.close)
            place = list(self._runtime.parallel.place) if runtime is not None else []
            if isinstance(source, ZarrSource) and source.attributes.get("parallel", []) != place:
                raise CheckpointError(
                    f"{path}: was saved as part {source.attributes.get('parallel', [])} of a model that tensor "
                    f"parallelism or a pipeline cuts, and this is {place} ([which, of how many] of each): load the "
                    "folder that the same part was saved to"
                )
            loading = Loading(source, contents, runtime, optimizer)
            loading.check(strict=strict, cast=cast)
            stack.pop_all()
        try:
            with meeting:
                loaded = loading.run()
                meeting.fact = source.unproven() if isinstance(source, ZarrSource) else []
            if isinstance(source, ZarrSource):
                with meeting:
                    source.prove(meeting.facts, meeting.rank)
            if ranks is None and isinstance(source, ZarrSource) and not (loaded.missing or loaded.unexpected):
                self._published = _published(source.path, contents)
        finally:
            source.close()
        return loaded

    def _finish(self) -> None:
        """Let the save that is under way come to its end. Raises what went wrong with it, once."""
        saving, self.latest = self.latest, None
        if saving is None:
            return
        saving.settle()
        self._runtime.pager.watcher = None
        if saving.result is not None:
            self._published = saving.result
        elif not saving.told:
            saving.wait()

    def close(self) -> None:
        """Let the save that is under way come to its end; if it failed, and nobody has been told, warn of it."""
        try:
            self._finish()
        except TiermemError as error:
            warnings.warn(f"a save in the background failed: {error}", RuntimeWarning, stacklevel=3)


def _published(path: Path, contents: Contents) -> Published:
    """What was just loaded is what the pages have, so a save may share its files."""
    info = os.lstat(path)
    pages = [group.parameter for group in contents.groups().values()]
    return Published(
        Path(os.path.abspath(path)), (info.st_dev, info.st_ino), {page.number: page.version for page in pages}
    )
