"""TieredModule: the wrapper that people use."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem import checkpoint, vertical
from tiermem.checkpoint import Loaded, Saving
from tiermem.compiled import Compiled
from tiermem.config import Config
from tiermem.device import Device
from tiermem.eager import eager
from tiermem.errors import ConfigError, PagingError
from tiermem.figures import figures
from tiermem.planner.explanation import Explanation, Laps, explain
from tiermem.resume import Resume
from tiermem.runtime import Runtime
from tiermem.tiling import Tile

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


class TieredModule(nn.Module):
    """A module whose parameters, gradients and optimizer state are paged between device, host and disk.

    Args:
        module: any ``nn.Module`` with plain parameters. Its own memory is let go of as it is taken over.
        config: a policy file's path, a dict of the same shape, a :class:`tiermem.Config`, or None for the defaults.
        device: a device to use instead of the one that ``device.kind`` names (for tests).
        group: the processes that train this model together, each with a slice of its state: a process group, a
            DeviceMesh of one dimension (``mesh["dp"]``), or None for all of torch.distributed, if that is initialised.
        pipeline: where ``module`` is one stage of a pipeline, the processes that have its other stages, likewise: the
            norm that clipping goes by, and an overflow that loss scaling finds, are those of all stages.
        resume: with ``[durability]``, the run to go on from: ``"auto"`` takes the newest in ``disk.paths`` that is of
            this module, or begins a new one where there is none; a path takes the run in that folder; None begins one.

    Names of parameters, buffers and state are the wrapped module's, and what this class doesn't have is looked up there
    (``model.generate``, ``model.config``). Use it like the module itself; :meth:`close` it at the end, or use ``with``.

    Raises:
        ConfigError: the configuration is refused, or the module has parameters that can't be paged, or the run to
            resume is in use, damaged, or of another module, in which case the message has all the differences.
        BudgetError: a budget is smaller than the smallest workable one, which the message names.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Source = None,
        *,
        device: Device | None = None,
        group: Any = None,
        pipeline: Any = None,
        resume: Resume = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule | TieredModule):
            raise ConfigError(
                f"a {type(module).__name__} can't be paged: only a plain torch.nn.Module can (close a TieredModule to "
                "wrap its module again)"
            )
        self._runtime = runtime = Runtime(module, Config.load(config), device, group, resume, pipeline)
        try:
            runtime.open()
            self.module = module
            self.training = module.training
            self._laps = Laps(runtime)
            self._saves = checkpoint.Saves(module, runtime)
            self._compiled: Compiled | None = None
            self._chain: list[Any] = []  # that has been compared with the model
            self._hidden = _hide_views(module, runtime)
            # The folder on disk goes with the process even when nobody calls close().
            self._finalizer = weakref.finalize(self, _abandon, runtime)
            # After the finalizer's own, so that it is run before: at the end nobody needs the parameters back.
            atexit.unregister(_ending.append)
            atexit.register(_ending.append, True)
        except BaseException:
            runtime.close()
            raise

    # -- computing ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        self._begin()
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            # Python calls no forward hook for a KeyboardInterrupt: leave what was entered.
            self._runtime.hooks.abort_pass()
            raise

    @eager
    def _begin(self) -> None:
        self._runtime.check_open()
        self._laps.mark()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. With ``set_to_none=False`` they become zeros."""
        if self._runtime.closed:
            self.module.zero_grad(set_to_none)
        elif set_to_none:
            self._runtime.hooks.forget_gradients()
        else:
            self._runtime.hooks.zero_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm together is at most ``max_norm``; returns the norm before.

        The same numbers as ``torch.nn.utils.clip_grad_norm_``, bit for bit, without bringing the gradients back:
        from the second call on, norms are taken while gradients land, and the factor is applied by the optimizer
        when it reads them. Raises RuntimeError with ``error_if_nonfinite`` when the norm isn't finite. Across ranks it
        is the norm of the mean gradient, equal up to rounding; all of them must call it. Raises PagingError where the
        optimizer updates units during backward: its first update is made before there is a norm.
        """
        self._runtime.check_open()
        updater = self._runtime.hooks.updater
        if updater is not None and not updater.clips:
            raise PagingError(
                "clip_grad_norm_() needs all gradients before the first update, and this model's optimizer updates "
                "units during backward: make it with during_backward=False"
            )
        if self._runtime.ranks is not None:
            self._runtime.hooks.release_resident()
        return self._runtime.hooks.gradients.clip(
            self.module.parameters(), max_norm, norm_type, error_if_nonfinite
        )

    def accumulate(
        self,
        batches: Iterable[tuple[Any, Any]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        accumulation: Literal["vertical", "horizontal"] = "vertical",
        chain: Iterable[Callable[[Any], Any]] | None = None,
    ) -> list[torch.Tensor]:
        """Forward and backward of a step's micro-batches, each ``(input, target)``; returns their losses, detached.

        The loss of one is ``loss_fn(model(input), target)``, a scalar. Gradients of all are added up, so divide in it.

        Vertical accumulation is for chains: an ``nn.Sequential``, or what ``chain`` names, modules and functions that
        the model's forward calls one after the other, each with what the one before returned. All micro-batches go
        through a link before any goes through the next, in forward and in backward, where links run again
        (checkpointing). So parameters are paged once for each, however many micro-batches there are; what goes from
        link to link is kept of all of them, and paged as ``placement.activations`` says. Gradients have the bits of one
        backward after the other, but for weights that several links use, and random numbers: both have another order.
        On the first call with a chain its output is compared with the model's, for one micro-batch in eval mode.
        ``accumulation="horizontal"`` is one micro-batch after the other, for any model.

        Raises ConfigError for a model that isn't a chain, or a chain that isn't the model.
        """
        self._begin()
        given = vertical.checked(batches, accumulation)
        if accumulation == "horizontal":
            return vertical.horizontal(self, given, loss_fn, self.no_sync)
        links = vertical.links_of(self.module, chain)
        if chain is not None and links != self._chain:
            vertical.compare(self._runtime.hooks, links, given[0][0])
            self._chain = links
        return vertical.accumulate(self._runtime.hooks, links, given, loss_fn)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients are added up here and not sent to other ranks: for all micro-batches but the last.

        Saves communication, and holds the whole gradients meanwhile, on the disk if need be. An optimizer that updates
        units during backward (``during_backward=True``) doesn't within it. Otherwise, without other ranks, it changes
        nothing.
        """
        reduction = self._runtime.hooks.reduction
        before, reduction.quiet = reduction.quiet, True
        try:
            yield
        finally:
            reduction.quiet = before

    # -- durability ---------------------------------------------------------------------------------------

    def register(self, name: str, each: Any, *, late: bool | None = None) -> None:
        """Have commits include the state of an object that has ``state_dict`` and ``load_state_dict``.

        If a commit was resumed that has a state of this ``name``, it is loaded now. ``late``: does the object change
        between the optimizer's step and the next forward, and belongs to the step before? It is known of torch's
        learning rate schedulers and gradient scalers; anything else is taken to be up to date when ``optimizer.step()``
        is called.
        Without durability, nothing happens. Raises ConfigError or PagingError for what can't be registered.
        """
        self._runtime.check_open()
        if self._runtime.commits is not None:
            self._runtime.commits.register(name, each, late)

    def unregister(self, name: str) -> None:
        """Commit the object of this name no longer, or do without its state in a resumed commit."""
        self._runtime.check_open()
        if self._runtime.commits is not None:
            self._runtime.commits.registered.remove(name)

    def commit(self) -> None:
        """Make the state durable as it is now: parameters, optimizer, buffers, generators, registered objects.

        It survives the process's end and a loss of power when this returns. Raises PagingError without durability, and
        between backward and the optimizer's step; TransferError when the disk fails.
        """
        self._runtime.check_open()
        if self._runtime.commits is None:
            raise PagingError('there is nothing to commit to: durability.mode is "off"')
        self._runtime.commits.commit()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this run so far; with durability, those before a resume are counted too."""
        runtime = self._runtime
        return runtime.commits.step if runtime.commits is not None else runtime.steps.number

    def restore_random(self) -> None:
        """Put random number generators back to where the resumed commit has them, until the first training forward.

        Wrapping, making the optimizer and :meth:`register` do it too, so that what is drawn before them doesn't count:
        this is for a loop that draws after them, before it goes on, what it didn't draw there in the run before.
        """
        self._runtime.check_open()
        if self._runtime.commits is not None:
            self._runtime.commits.put_back()

    # -- what nn.Module shows -----------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped module's parameters under its own names. Their bytes come when they are touched."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The wrapped module's buffers under its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state with full tensors of their own; takes as much memory as they have bytes."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Write a state into the pages. ``assign`` would put foreign tensors in their place and is refused."""
        if assign and not self._runtime.closed:
            raise PagingError(
                "load_state_dict(assign=True) can't be had while the model is paged: leave assign out"
            )
        self._settle()
        return self.module.load_state_dict(state_dict, strict)

    def _settle(self) -> None:
        """Have an update that is pending made (``delayed=True``)."""
        if not self._runtime.closed:
            self._runtime.hooks.settle()

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        overwrite: bool = False,
        compression: str = "none",
        chunk_nbytes: int = checkpoint.CHUNK_NBYTES,
        only: Callable[[str], bool] | None = None,
    ) -> Saving:
        """Write a checkpoint to ``path``: a Zarr group of all parameters, buffers and, if given, the optimizer's state.

        Pages are read where they are and streamed: it takes no room within the budgets, and at most 80 MiB beside them.
        The folder appears under its name when all of it is on the disk, and not before.

        Args:
            path: a folder that isn't there yet, or with ``overwrite`` a checkpoint, which stays whole until then.
            optimizer: its moments, master weights, counts of updates and parameter groups are saved too.
            step: the number of the step that it is of; by default the updates that there have been.
            extra: whatever else is to be kept, as far as JSON has a form for it (a scheduler's ``state_dict()``).
            background: return at once, and save while training goes on. The state saved is that of this call;
                ``wait()`` of what is returned says how it ended. The optimizer waits where it comes to pages that
                haven't been saved yet. Buffers, and state that is in no page, are copied first.
            compression: "none", "zstd", "blosc" or "gzip". Without one, files are written past the page cache.
            chunk_nbytes: the most bytes of one file; five of them are the memory that saving takes.
            only: called with each name; what it refuses is left out (adapters alone: ``lambda name: "lora_" in name``).

        Parameters that haven't changed since the last checkpoint that was saved or loaded here (frozen ones) are given
        a second name in the new one (a hard link) where the filesystem allows it, and not written again.

        Where several ranks share the model, all call it, with a path that all see; each writes its own slices into the
        same files. That can't be done in the background, compressed or with links.

        After :meth:`close` it saves the parameters of the module as they are then; the optimizer's state went with the
        pages. Raises CheckpointError for what can't be saved, SavingError (an OSError) when the disk refuses.
        """
        self._settle()
        return self._saves.save(
            path,
            optimizer,
            step=step,
            extra=extra,
            background=background,
            overwrite=overwrite,
            compression=compression,
            chunk_nbytes=chunk_nbytes,
            only=only,
        )

    def load(
        self,
        path: str | os.PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> Loaded:
        """Read a checkpoint into the pages, one at a time: whatever budgets, placements and units it was saved with.

        Args:
            path: a folder that :meth:`save` wrote; or safetensors (a file, or a Hugging Face folder), a file of
                ``torch.save`` (only tensors and plain values are loaded), a folder of ``torch.distributed.checkpoint``
                or of DeepSpeed's ZeRO-3. The last one has an optimizer's state too.
            optimizer: gets its state back too: moments, master weights, updates, and its groups' settings.
            strict: whether a name that only one side has is an error.
            cast: whether floating-point dtypes may differ. A parameter that the checkpoint has in float32, as master
                weights or as it is, becomes the master of a half-precision one.

        Any number of ranks may load what any number has saved; all of them call it, and each reads its own slices.

        Raises CheckpointError with every difference of names, shapes and dtypes there is, before anything is changed;
        or when a file is damaged.
        """
        self._settle()
        return self._saves.load(path, optimizer, strict=strict, cast=cast)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def to(self, *args: Any, **kwargs: Any) -> TieredModule:
        """The model itself, if it is on that device and of that dtype already; anything else is refused."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        own = self._runtime.device.torch_device
        there = device is None or (device.type == own.type and device.index in (None, own.index))
        if there and all(p.dtype is dtype for p in self.parameters() if dtype and p.is_floating_point()):
            return self
        return super().to(*args, **kwargs)

    def cpu(self) -> TieredModule:
        """As ``to("cpu")``."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> TieredModule:
        """As ``to("cuda")``."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def share_memory(self) -> TieredModule:
        """Refused: frames are this process's own."""
        raise PagingError(
            "a paged model can't be shared between processes: close() it, or wrap it in each of them"
        )

    def compile(self, **settings: Any) -> None:
        """Compile the model within its units: each one's forward as ``torch.compile`` makes it, until :meth:`close`.

        ``settings`` are those of ``torch.compile``. What runs between units, and paging itself, stays as it is.
        """
        self._runtime.check_open()
        if self._compiled is not None:
            self._compiled.close()
        units = self._runtime.units
        tiles = [
            unit for unit in units if isinstance(unit.module, Tile)
        ]  # units with tiles inside run as they are
        apart = {unit.number for unit in tiles} | {number for unit in tiles for number in unit.outer}
        outermost = [
            unit.module for unit in units if not (unit.resident or unit.outer or unit.number in apart)
        ]
        self._compiled = Compiled(outermost, settings)

    def _apply(self, fn: Any, recurse: bool = True) -> TieredModule:
        raise PagingError(
            "a paged model can't be moved or cast (to, cuda, half, ...): set [device] kind and [precision] parameters "
            "in the policy file, or close() it first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredModule:
        raise PagingError(
            "a paged model can't be copied: copy the module before wrapping, or use state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PagingError("a paged model can't be pickled: save its state_dict()")

    def _replicate_for_data_parallel(self) -> TieredModule:
        raise PagingError(
            "a paged model can't be replicated by DataParallel: use one process for each device"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # The first thing that DistributedDataParallel asks of a module.
        raise PagingError(
            "a paged model can't be wrapped in DistributedDataParallel, which would keep buckets of gradients beside "
            "the budget, and hold every parameter: nothing is reduced over ranks here"
        )

    # -- telling ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Figures of the run so far; all sizes in bytes.

        ``tiers``: for each tier its ``budget``, the ``smallest`` workable one, bytes ``in_use`` and their ``peak``;
        ``links``: bytes moved from tier to tier by kind of page; ``hits`` and ``faults``: requests for pages that were
        there, or had to be waited for; ``prefetches`` begun, used, late and wasted (dropped unused);
        ``stall_seconds`` in all and by cause; ``nbytes_written_to_disk``; ``departures``: uses of units that the
        schedule had not foreseen; ``state_nbytes``: all pages, which is what a run that is not paged holds.
        ``tiles``: the parameters that no budget holds whole, and in how many tiles each is.
        ``activations``, where they are paged: storages ``paged`` and ``kept`` in memory for want of room, with their
        bytes; ``peak_saved`` that graphs held at one time, and ``peak_in_memory``, what of it was in memory outside of
        the ``arena``.
        """
        return figures(self._runtime)

    def explain(self) -> Explanation:
        """What the plans foretell of a step beside what the last steps were: bytes, seconds, stalls, the bottleneck.

        Printed, it is a table; ``to_dict()`` has the figures, sizes in bytes and times in seconds. Call it between two
        steps. Where the model is paged to a disk, the disk's rate is measured on the way, with 64 MiB in the run's
        first folder, unless a trace has had it measured at the beginning. Raises PagingError when the model is closed,
        and OSError when the disk can't be measured.
        """
        self._runtime.check_open()
        return explain(self._runtime, self._laps)

    @property
    def units(self) -> list[str]:
        """The names of the units, the resident one first."""
        return [unit.name for unit in self._runtime.units]

    # -- the end ------------------------------------------------------------------------------------------

    def close(self, restore: bool = True) -> None:
        """Stop paging: the wrapped module is an ordinary one again, on its device, with all its parameters.

        With ``restore=False`` their values are given up, which takes no time and no memory. Idempotent.
        """
        self._saves.close()
        for handle in self._hidden:
            handle.remove()
        self._hidden = []
        if self._compiled is not None:
            self._compiled.close()
            self._compiled = None
        self._runtime.close(restore)
        self._finalizer.detach()

    def __enter__(self) -> TieredModule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._runtime.leave(error)
        self.close()


_ending: list[bool] = []  # not empty once the interpreter ends


def _abandon(runtime: Runtime) -> None:
    """Close the runtime of a model that nobody closed, from whichever thread it was collected in."""
    if _ending:
        error = getattr(sys, "last_value", None)
        if error is not None:
            runtime.leave(error)
        runtime.close(restore=False)
        return
    warnings.warn(
        "a TieredModule was dropped without close(): it is closed now", ResourceWarning, stacklevel=2
    )
    if threading.current_thread().name.startswith("tiermem"):
        # One of ours, which closing would wait for.
        threading.Thread(target=runtime.close).start()
    else:
        runtime.close()


def _hide_views(module: nn.Module, runtime: Runtime) -> list[Any]:
    """Have ``state_dict`` take copies: a state must outlive the frames, and must not pin all of them at once."""

    hooks = runtime.hooks
    handles: list[Any] = []
    for each in module.modules():
        registers: tuple[Any, Any] = (each.register_state_dict_pre_hook, each._register_state_dict_hook)
        handles += [
            register(hook)
            for register, hook in zip(registers, (hooks.begin_copying, hooks.end_copying), strict=True)
        ]
    return handles
