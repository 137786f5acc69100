"""Wholes: parameters in tiles, as everybody else sees them: one parameter each.

``F.linear`` and ``F.embedding`` walk the tiles, forward and backward, each fetched as a unit is; the latter only those
that it looks rows up in. Gradients land tile by tile. Whatever else is done to the parameter, or its gradient, is done
to a copy, which whoever does it has the memory for, and what that changes is written to the tiles.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tiermem.aside import Aside
from tiermem.eager import eager
from tiermem.errors import PagingError
from tiermem.hooks import Hooks
from tiermem.parameter import LAYOUT, Face, TiledParameter, TiledView, face_owner, own
from tiermem.tiling import Tiled
from tiermem.unit import Group
from tiermem.walks import Embedding, Linear

_Tensor: Any = torch.Tensor
_GET_DATA = _Tensor.data.__get__


class Copy(torch.Tensor):
    """A view of a copy of a parameter in tiles. What is written to it would be lost: that is refused."""

    of: str  # which parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        copies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Copy)]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [copy._version for copy in copies]
            result = func(*args, **(kwargs or {}))
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version:
                    raise PagingError(
                        f"{copy.of} is in tiles, and what was written to is a view of a copy, which nobody reads: "
                        "write to the parameter as a whole (copy_, mul_, nn.init), or close() the model"
                    )
            places = {copy.untyped_storage().data_ptr(): copy.of for copy in copies}
            return tree_map_only(torch.Tensor, lambda leaf: _marked(leaf, places), result)


class Untraced:
    """A module's forward that compilers run as it is, until :meth:`remove`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.forward = eager(module.forward)

    def remove(self) -> None:
        """The module has its own forward again."""
        vars(self._module).pop("forward", None)


class Whole:
    """One parameter in tiles, as it is to everybody: the owner that all that is done to it is passed on to.

    ``folder``: where its gradient lies in one piece while a norm of it is taken.
    """

    def __init__(self, tiled: Tiled, hooks: Hooks, folder: Path) -> None:
        self.hooks = hooks
        self.tiles = tiled.tiles
        self.pieces = [tile.values for tile in tiled.tiles]
        self.groups: list[Group] = [hooks.home[id(piece)][0] for piece in self.pieces]
        self.name = tiled.name
        self.size = tuple(tiled.parameter.shape)
        self._aside = (
            Aside(self.groups, hooks) if len(tiled.owners) > 1 else None
        )  # tied: used more than once
        self._tiled = tiled
        self._parameter = tiled.parameter
        self._folder = folder

    def attach(self) -> None:
        """Take the parameter over, until its hooks are detached."""
        self.hooks.tiled[id(self._parameter)] = self._tiled
        own(self._parameter, self, TiledParameter)
        for module in self._tiled.owners:
            if "forward" not in vars(module):
                self.hooks.keep(Untraced(module))

    # -- what is computed by tiles ----------------------------------------------------------------------------

    @eager
    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``F.linear``; for the bits of the input's gradient see :mod:`tiermem.products`."""
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.is_floating_point():
            dtype = torch.get_autocast_dtype(device)
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            result: torch.Tensor = Linear.apply(input, bias, weight, self)  # type: ignore[no-untyped-call]
        return result

    @eager
    def embedding(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        """As ``F.embedding``. Raises PagingError for what can't be had by tiles, and IndexError as torch does."""
        if max_norm is not None or sparse:
            raise PagingError(
                f"{self.name} is in tiles, of which F.embedding can't be had with max_norm or sparse=True: leave that "
                "out, or raise the budget"
            )
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.size[0]:
            raise IndexError("index out of range in self")
        padding = -1 if padding_idx is None else padding_idx % self.size[0]
        result: torch.Tensor = Embedding.apply(input, weight, self, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]
        return result

    def begin(self, group: Group) -> None:
        """A use of the parameter is about to contribute to a tile's gradient."""
        if self._aside is not None:
            with self.hooks.door.hold():
                self._aside.begin(group)

    def land(self, group: Group, gradient: torch.Tensor) -> None:
        """A tile's gradient is complete for one use of the parameter."""
        with self.hooks.door.hold():
            self.hooks.gradients.land(group, 0, gradient)

    # -- what else is done to it, see parameter.Owner -----------------------------------------------------------

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` by tiles where that is possible, and with copies where it isn't."""
        inputs = args[0] if args else kwargs.get("input")
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if (
            func in _BY_TILES
            and not isinstance(inputs, Face)
            and isinstance(weight, Face)
            and _is_values(weight)
        ):
            return _BY_TILES[func](whole_of(weight), *args, **kwargs)
        if args and isinstance(args[0], Face):
            whole, of_gradient = whole_of(args[0]), not _is_values(args[0])
            if func in LAYOUT:
                return func(whole.layout(args[0]), *args[1:], **kwargs)
            if func in (_Tensor.detach, _GET_DATA):
                return whole.detached(of_gradient)
            if func is torch.linalg.vector_norm and not (torch.is_grad_enabled() and args[0].requires_grad):
                with whole.mapped(of_gradient) as copy:
                    return func(copy, *args[1:], **kwargs)
            if func is _Tensor.copy_ and not isinstance(args[1], Face) and not torch.is_grad_enabled():
                whole.scatter(args[1].expand(whole.size), of_gradient)
                return args[0]
        return _on_copies(func, args, kwargs)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What there is of a gradient, as one: what is written to it is written to the tiles' pages."""
        return self._view(True) if any(group.landed[0] for group in self.groups) else None

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace it; None forgets it."""
        if gradient is not None and (tuple(gradient.shape), gradient.dtype) != (
            self.size,
            self.groups[0].dtype,
        ):
            raise PagingError(
                f"assigned a gradient of shape {list(gradient.shape)} and dtype {gradient.dtype} to {self.name}, "
                f"which has {list(self.size)} and {self.groups[0].dtype}"
            )
        if isinstance(gradient, TiledView):
            gradient = whole_of(gradient).gather(not _is_values(gradient))
        for tile in self.tiles:
            tile.values.grad = None if gradient is None else gradient[tile.start : tile.stop]

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Write the parameter's values."""
        if (tuple(data.shape), data.dtype) != (self.size, self.groups[0].dtype):
            raise PagingError(
                f"{self.name}.data = a tensor of shape {list(data.shape)} and dtype {data.dtype}; a paged parameter "
                f"keeps its shape {list(self.size)} and dtype {self.groups[0].dtype}: close the model to change them"
            )
        self.scatter(whole_of(data).gather(not _is_values(data)) if isinstance(data, Face) else data, False)

    def check_trainable(self, parameter: torch.Tensor) -> None:
        """Raise PagingError for a parameter that was frozen when the model was wrapped."""
        self.hooks.check_trainable(self.pieces[0])

    def layout(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that has the parameter's size and strides."""
        return torch.empty(self.size, dtype=self.groups[0].dtype, device="meta")

    # -- in one piece -------------------------------------------------------------------------------------------

    def detached(self, of_gradient: bool) -> torch.Tensor:
        """The parameter without autograd; for ``state_dict``, a copy."""
        views = self.hooks.views
        if of_gradient or not views.copying:
            return self._view(of_gradient)
        if id(self._parameter) not in views.copies:
            views.copies[id(self._parameter)] = self.gather(False)
        return views.copies[id(self._parameter)]

    def _view(self, of_gradient: bool) -> TiledView:
        with torch._C.DisableTorchFunctionSubclass():
            view: TiledView = self._parameter.detach().as_subclass(TiledView)
        view.owner, view.of_gradient = self, of_gradient
        return view

    def gather(self, of_gradient: bool, into: torch.Tensor | None = None) -> torch.Tensor:
        """The parameter, or its gradient, in one piece; where no gradient has landed it is zeros."""
        whole = into
        if whole is None:
            device = "cpu" if of_gradient else self.hooks.views.tier.memory.device
            whole = torch.empty(self.size, dtype=self.groups[0].dtype, device=device)
        with torch.no_grad():
            for tile, group in zip(self.tiles, self.groups, strict=True):
                place = whole[tile.start : tile.stop]
                if of_gradient and not group.landed[0]:
                    place.zero_()
                else:
                    place.copy_(tile.values.grad if of_gradient else tile.values)  # type: ignore[arg-type]
        return whole

    def scatter(self, whole: torch.Tensor, of_gradient: bool) -> None:
        """Write the tiles, or what gradients have landed for them."""
        with torch.no_grad():
            for tile in self.tiles:
                target = tile.values.grad if of_gradient else tile.values
                if target is not None:
                    target.copy_(whole[tile.start : tile.stop])

    @contextmanager
    def mapped(self, of_gradient: bool) -> Iterator[torch.Tensor]:
        """What :meth:`gather` gives, in a file: the system keeps of it in memory what it has room for."""
        dtype, numel = self.groups[0].dtype, self.size[0] * self.size[1]
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(numel * dtype.itemsize)
            memory = mmap.mmap(file.fileno(), numel * dtype.itemsize)  # unmapped when no tensor looks into it
            yield self.gather(of_gradient, torch.frombuffer(memory, dtype=dtype).view(self.size))


_BY_TILES: dict[Any, Callable[..., Any]] = {F.linear: Whole.linear, F.embedding: Whole.embedding}


def whole_of(tensor: torch.Tensor) -> Whole:
    """Who has a parameter in tiles that this is, or is a view of."""
    assert isinstance(tensor, Face)
    owner = face_owner(tensor)
    assert isinstance(owner, Whole)
    return owner


def _is_values(tensor: Any) -> bool:
    return isinstance(tensor, Face) and not (isinstance(tensor, TiledView) and tensor.of_gradient)


def _on_copies(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with copies in the place of what is in tiles; what it writes to them is written to the tiles."""
    faces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Face):
            return leaf
        if id(leaf) not in faces:
            copy = whole_of(leaf).gather(not _is_values(leaf))
            copy.requires_grad_(leaf.requires_grad and torch.is_grad_enabled())
            faces[id(leaf)] = leaf, copy
        return faces[id(leaf)][1]

    args, kwargs = tree_map(copied, (args, kwargs))
    versions = {key: copy._version for key, (_, copy) in faces.items()}
    result = func(*args, **kwargs)
    names = {}
    for key, (face, copy) in faces.items():
        whole = whole_of(face)
        names[copy.untyped_storage().data_ptr()] = whole.name
        if copy._version != versions[key]:
            whole.scatter(copy.detach(), not _is_values(face))
        elif copy.requires_grad and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(result)
        ):
            raise PagingError(
                f"{whole.name} is in tiles, since the budget doesn't hold it whole, and autograd can follow it through "
                f"F.linear and F.embedding only, not {getattr(func, '__name__', func)}: use it there, under no_grad() "
                "or detached, or raise the budget"
            )
    back = {id(copy): face for face, copy in faces.values()}
    return tree_map_only(
        torch.Tensor, lambda leaf: back[id(leaf)] if id(leaf) in back else _marked(leaf, names), result
    )


def _marked(tensor: torch.Tensor, names: dict[int, str]) -> torch.Tensor:
    """A result that looks into a copy of one of these parameters, by the address of the memory, as what it is."""
    if isinstance(tensor, Face) or tensor.layout is not torch.strided:
        return tensor
    name = names.get(tensor.untyped_storage().data_ptr())
    if name is None or isinstance(tensor, Copy):
        return tensor
    copy: Copy = tensor.as_subclass(Copy)
    copy.of = name
    return copy
