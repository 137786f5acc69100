"""Deferrals: parameters without memory, whose values come when they are needed and go again.

A deferred parameter answers metadata at once. Whoever needs its values gets them for the operation, after which they
are dropped. What is kept is a recipe: the initialisers that were called, with the random state before each. They run
when the model calls them, so that the generator is where it would be and the next draw is the same; and once more when
:class:`tiermem.TieredModule` takes the parameter over. Values that no recipe can give (computed from other tensors)
are put aside on the disk. Memory is that of one parameter at a time, whatever the model.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions

from tiermem.errors import PagingError
from tiermem.loan import Loans
from tiermem.pageable import is_dense
from tiermem.parameter import DeferredParameter, PagedView, disown, own, owner_of
from tiermem.recipe import Call, FromSpill, Recipe
from tiermem.spill import Spill, flat
from tiermem.tier import trim_memory

_Tensor: Any = torch.Tensor
_StorageRef: Any = reductions.StorageWeakRef
_init: Any = nn.init

SMALL = 1 << 14
"""Bytes. A smaller parameter (a bias, a norm's weight) is an ordinary one."""
MAX_UNTRIMMED = 64 << 20
"""Bytes of values that are dropped before malloc is asked to give back what has been freed of them."""

_OVERWRITE = {
    _Tensor.normal_, _Tensor.uniform_, _Tensor.zero_, _Tensor.fill_, _Tensor.exponential_, _Tensor.log_normal_,
    _Tensor.cauchy_, _Tensor.geometric_, _Tensor.random_, _Tensor.bernoulli_, _init.uniform_, _init.normal_,
    _init.constant_, _init.kaiming_uniform_,
}  # fmt: skip
"""What gives all elements of its first argument new values, and reads none."""


class Deferred:
    """One deferred parameter. ``content`` are its values while somebody needs them; ``pins`` counts their views."""

    def __init__(self, data: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tuple(data.shape), tuple(data.stride()), data.dtype
        self.recipe = Recipe()
        self.content: torch.Tensor | None = None
        self.told = True  # does the recipe give the content?
        self.pins = 0

    def whole(self, tensor: torch.Tensor) -> bool:
        """Is this view of the content all of it, as it is?"""
        content = self.content
        return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) == (
            self.size, self.stride, self.dtype,
        ) and (content is None or tensor.storage_offset() == content.storage_offset())  # fmt: skip

    def empty(self) -> torch.Tensor:
        """Memory for the values."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


class _Tie(weakref.ref[torch.Tensor]):
    """Tells, by a queue, that a deferred parameter has died; see Note: loans about why by a queue."""

    __slots__ = ("deferral", "identity")

    deferral: Deferral
    identity: int


_dead: deque[_Tie] = deque()


def forget_dead() -> None:
    """Let go of deferred parameters that have died."""
    while _dead:
        tie = _dead.popleft()
        tie.deferral.forget(tie.identity, tie)


class Deferral:
    """The deferred parameters of one :func:`deferred_init`: their owner until a TieredModule takes them over.

    It lives as long as they do. What it puts aside is in ``folder``, up to ``capacity`` bytes.
    """

    def __init__(self, folder: Path, capacity: int, draw: bool = True) -> None:
        self.draw = draw
        self._folder = folder
        self._capacity = capacity
        self._thread = threading.get_ident()
        self._deferred: dict[int, tuple[_Tie, Deferred]] = {}
        self._loans = Loans()
        self._spill: Spill | None = None
        self._dropped = 0  # bytes of values since malloc was asked to give them back
        self._empties: dict[int, Any] = {}

    # -- coming into being ----------------------------------------------------------------------------------

    def made_empty(self, tensor: Any) -> None:
        """This tensor has been made and nothing written to it."""
        if len(self._empties) > 64:
            self._empties = {key: ref for key, ref in self._empties.items() if not ref.expired()}
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
            ref = _StorageRef(tensor.untyped_storage())
            self._empties[ref.cdata] = ref

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """A module registers a parameter; large ones are deferred from here on."""
        if (
            threading.get_ident() == self._thread
            and type(parameter) is nn.Parameter
            and parameter.device.type == "cpu"
            and parameter.layout is torch.strided
            and not parameter.is_inference()
            and parameter.numel()
            and parameter.nbytes >= SMALL
            and is_dense(parameter.shape, parameter.stride())
        ):
            ref = self._empties.get(parameter.untyped_storage()._cdata)
            self.defer(parameter, ref is not None and not ref.expired() and parameter._version == 0)

    def defer(self, parameter: nn.Parameter, empty: bool) -> Deferred:
        """Take the parameter's memory from it; ``empty``: without keeping what is in it."""
        deferred = Deferred(parameter.data)
        tie = _Tie(parameter, _dead.append)
        tie.deferral, tie.identity = self, id(parameter)
        self._deferred[id(parameter)] = (tie, deferred)
        if not empty:
            deferred.content, deferred.told = parameter.data, False
        self.cool(but=[deferred])
        own(parameter, self, DeferredParameter)
        if empty:
            self._bind(parameter, deferred)
        return deferred

    def copy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Another parameter with the same values, deferred too (``copy.deepcopy``)."""
        _, own_ = self._deferred[id(parameter)]
        if not own_.told:
            self._put_aside(own_)
        twin = nn.Parameter(_absent(own_), parameter.requires_grad)
        deferred = self.defer(twin, empty=True)
        deferred.size, deferred.stride, deferred.dtype = own_.size, own_.stride, own_.dtype
        base = own_.recipe.base
        if isinstance(base, FromSpill):
            # Its place on the disk is its own: it may be written again.
            deferred.content, deferred.told = own_.empty(), False
            own_.recipe.fill(deferred.content)
            self._bind(twin, deferred)
        else:
            deferred.recipe = Recipe(base, own_.recipe.calls)
        return twin

    def give(self, parameter: torch.Tensor, recipe: Recipe) -> None:
        """From now on these are the parameter's values."""
        tie, deferred = self._deferred[id(parameter)]
        deferred.content, deferred.recipe, deferred.told = None, recipe, True
        self._bind(tie(), deferred)

    # -- warm and cold --------------------------------------------------------------------------------------

    def cool(self, but: Sequence[Deferred] = ()) -> None:
        """Drop the values that are in memory, ``but`` those; views that somebody holds keep theirs."""
        self._loans.collect()
        forget_dead()
        for tie, deferred in list(self._deferred.values()):
            if deferred.content is not None and not deferred.pins and deferred not in but:
                if not deferred.told:
                    self._put_aside(deferred)
                self._dropped += deferred.content.nbytes
                deferred.content = None
                self._bind(tie(), deferred)
        if self._dropped > MAX_UNTRIMMED:
            self._dropped = 0
            trim_memory()  # what is freed lies between what is kept, and would be kept too

    def _put_aside(self, deferred: Deferred) -> None:
        assert deferred.content is not None
        if self._spill is None:
            self._spill = Spill(self._folder, self._capacity)
        base = deferred.recipe.base
        old = base if isinstance(base, FromSpill) else None
        place = self._spill.write(deferred.content, (old.offset, old.nbytes) if old else None)
        deferred.recipe = Recipe(FromSpill(self._spill, *place))
        deferred.told = True

    def _warm(self, tie: _Tie, deferred: Deferred, empty: bool = False) -> torch.Tensor:
        """Have the values in memory; ``empty``: only the memory, since all of it will be written."""
        if deferred.content is None:
            content = deferred.empty()
            if not empty:
                deferred.recipe.fill(content)
            deferred.content = content
            self._bind(tie(), deferred)
        return deferred.content

    def _bind(self, parameter: torch.Tensor | None, deferred: Deferred) -> None:
        """Make the parameter what is in memory of it: all, or nothing."""
        if parameter is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                parameter.data = _absent(deferred) if deferred.content is None else deferred.content

    # -- what adoption asks ---------------------------------------------------------------------------------

    def fill(self, parameter: torch.Tensor, target: torch.Tensor) -> None:
        """Write the parameter's values to ``target`` (its shape), by its initialisers where nothing is converted."""
        tie, deferred = self._deferred[id(parameter)]
        same = target.dtype is deferred.dtype or deferred.recipe.exact(deferred.dtype)
        if deferred.content is None and tuple(target.stride()) == deferred.stride and same:
            deferred.recipe.fill(target)
            return
        self.cool(but=[deferred])
        target.copy_(self._warm(tie, deferred))

    def elements(self, parameter: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Those elements of the parameter, counted as they lie in memory (one dimension)."""
        tie, deferred = self._deferred[id(parameter)]
        if deferred.content is None:
            part = torch.empty(high - low, dtype=deferred.dtype)
            contiguous = torch.empty(deferred.size, device="meta").stride() == deferred.stride
            if deferred.recipe.fill_part(part, low, contiguous):
                return part
        self.cool(but=[deferred])
        return flat(self._warm(tie, deferred))[low:high]

    def take_back(self, parameter: torch.Tensor) -> None:
        """The parameter is deferred again, as before, after a wrap that was broken off."""
        own(parameter, self, DeferredParameter)
        self._bind(parameter, self._deferred[id(parameter)][1])

    def forget(self, identity: int, tie: _Tie | None = None) -> None:
        """This parameter is deferred no more; with the last one, what was put aside goes."""
        known = self._deferred.get(identity)
        if known is None or (tie is not None and known[0] is not tie):
            return
        del self._deferred[identity]
        if not self._deferred and self._spill is not None:
            self._spill.close()
            self._spill = None

    # -- the owner of the parameters, see parameter.Owner -----------------------------------------------------

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` with the values of ``tensors`` in memory, and note what made or changed them."""
        with torch._C.DisableTorchFunctionSubclass():
            known = {id(found[1]): found for tensor in tensors if (found := self._find(tensor)) is not None}
            touched = list(known.values())
            target = args[0] if args else next(iter(kwargs.values()), None)
            # Can it be made again, on this parameter alone? Does it need what was there before?
            alone = len(touched) == 1 and all(
                tensor is touched[0][0]() or touched[0][1].whole(tensor) for tensor in tensors
            )
            overwrites = func in _OVERWRITE and alone and any(target is tensor for tensor in tensors)
            call = Call.of(func, args, kwargs, tensors) if alone else None
            overwrites = overwrites and call is not None
            if overwrites and not self.draw:
                return target
            self.cool(but=[deferred for _, deferred in touched])
            empty = overwrites or (func is _Tensor.copy_ and alone and target is tensors[0])
            made = [each for each in touched if empty and each[1].content is None]
            for tie, deferred in touched:
                self._warm(tie, deferred, empty)
            versions = [tensor._version for tensor in tensors]
            done = False
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse):
                    result = func(*args, **kwargs)
                done = True
            finally:
                for tensor, version in zip(tensors, versions, strict=True):
                    if (found := self._find(tensor)) is not None and tensor._version != version:
                        self._note(found[1], call if done else None, overwrites)
                for tie, deferred in () if done else made:
                    deferred.content, deferred.told = None, True  # broken off: the values are the old ones
                    self._bind(tie(), deferred)
            return self._wrap(result)

    def _note(self, deferred: Deferred, call: Call | None, overwrites: bool) -> None:
        """The values have been changed by ``call``, if it can be made again."""
        if call is None or not (deferred.told or overwrites):
            deferred.told = False
            return
        call = call.drawn()
        if overwrites:
            deferred.recipe = Recipe(calls=[call])
        else:
            deferred.recipe.calls.append(call)
        deferred.told = True

    def _find(self, tensor: torch.Tensor) -> tuple[_Tie, Deferred] | None:
        """Which deferred parameter this is, or looks into."""
        known = self._deferred.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known
        place = tensor.untyped_storage().data_ptr()
        for each in self._deferred.values():
            content = each[1].content
            if content is not None and content.untyped_storage().data_ptr() == place:
                return each
        return None

    def _wrap(self, result: Any) -> Any:
        """Results that look into values in memory become views that keep them there."""
        if isinstance(result, torch.Tensor):
            if result.layout is not torch.strided or result.device.type != "cpu" or owner_of(result) is self:
                return result
            found = self._find(result)
            if found is None:
                return result
            found[1].pins += 1
            view = result.as_subclass(PagedView)
            self._loans.lend(view, found[1], self)
            return view
        if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
            items = [self._wrap(item) for item in result]
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What autograd keeps of a tensor: nothing of a deferred one, whose values won't be there."""
        return tensor.detach() if self._find(tensor) is None else None

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient, which nothing is done to."""
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.grad

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace it."""
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = gradient

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Replace the parameter's values, and with them its shape, dtype and device."""
        with torch._C.DisableTorchFunctionSubclass():
            own_ = data.detach().as_subclass(torch.Tensor)
            if own_.device.type != "cpu":
                assert isinstance(parameter, nn.Parameter)
                disown(parameter)
                self.forget(id(parameter))
                parameter.data = own_
                return
            tie, deferred = self._deferred[id(parameter)]
            dense = is_dense(own_.shape, own_.stride())
            own_ = own_ if dense else own_.contiguous()
            fresh = Deferred(own_)
            fresh.content, fresh.told, fresh.recipe = own_, False, Recipe(deferred.recipe.base)
            self._deferred[id(parameter)] = (tie, fresh)
            self._bind(parameter, fresh)
            self.cool(but=[fresh])

    def check_trainable(self, parameter: torch.Tensor) -> None:
        """Nothing is decided before it is wrapped."""

    def layout(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that has the parameter's size and strides."""
        _, deferred = self._deferred[id(parameter)]
        return torch.empty_strided(deferred.size, deferred.stride, dtype=deferred.dtype, device="meta")


def deferral_of(parameter: torch.Tensor) -> Deferral | None:
    """Who defers this parameter; None for every other one."""
    owner = owner_of(parameter)
    return owner if isinstance(owner, Deferral) else None


def _absent(deferred: Deferred) -> torch.Tensor:
    """The shape without the bytes: one element, not a number, behind every index."""
    fill = float("nan") if deferred.dtype.is_floating_point else 0
    return torch.full((), fill, dtype=deferred.dtype).expand(deferred.size)


def _refuse(saved: torch.Tensor | None) -> torch.Tensor:
    if saved is None:
        raise PagingError(
            "this graph was made with parameters of deferred_init, whose values are not in memory: wrap the module in "
            "tiermem.TieredModule before its first forward"
        )
    return saved
