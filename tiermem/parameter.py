"""Parameters whose bytes are elsewhere, and views of frames: both bring their page back when they are touched.

Inside its unit's forward a parameter is an ordinary ``torch.nn.Parameter`` with its bytes in place. Outside of it,
its class is :class:`PagedParameter`: shape, dtype and the like are answered at once, and any operation that needs the
values makes the page resident first and keeps it so until the operation is over. Tensors that look into a frame (a
transpose of a weight, say) are :class:`PagedView`: while they live, their page is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from tiermem.loan import borrower_owner

_Tensor: Any = torch.Tensor


class Owner(Protocol):
    """Who pages a parameter: what a touch is passed on to."""

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` with the pages of ``tensors`` resident."""

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient: a view of its gradient page on the host, or None."""

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace the parameter's gradient; None forgets it."""

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Write the parameter's values."""

    def check_trainable(self, parameter: torch.Tensor) -> None:
        """Raise where the parameter can't be given gradients any more."""

    def layout(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that has the parameter's size and strides."""


_owners: dict[int, Owner] = {}


def own(parameter: torch.Tensor, owner: Owner, kind: type[PagedParameter] | None = None) -> None:
    """From now on touches of ``parameter`` (or of a buffer) go to ``owner``."""
    _owners[id(parameter)] = owner
    parameter.__class__ = kind or classes_of(parameter)[1]


def disown(parameter: torch.Tensor) -> None:
    """Make it an ordinary parameter, or buffer, again."""
    parameter.__class__ = classes_of(parameter)[0]
    _owners.pop(id(parameter), None)


def classes_of(parameter: torch.Tensor) -> tuple[type[torch.Tensor], type[torch.Tensor]]:
    """What it is with its bytes in place, and what without. Who owns it may switch between these by assignment."""
    if isinstance(parameter, nn.Parameter):
        return nn.Parameter, PagedParameter
    return torch.Tensor, PagedBuffer


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Who pages this parameter; None for an ordinary one."""
    # An ordinary one may have the id of one that has died.
    return _owners.get(id(parameter)) if isinstance(parameter, PagedParameter) else None


class PagedParameter(nn.Parameter):
    """A parameter outside of its unit's forward. Its class changes; the object stays the same."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter with all its bytes."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy.__reduce_ex__(protocol)


class DeferredParameter(PagedParameter):
    """A parameter that has not been paged yet, and no bytes of its own either: see ``tiermem.deferral``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is deferred too."""
        if id(self) not in memo:
            owner: Any = _owners[id(self)]
            memo[id(self)] = owner.copy(self)
        copy: nn.Parameter = memo[id(self)]
        return copy


class TiledParameter(PagedParameter):
    """A parameter in tiles: it has no bytes of its own, and no unit has it whole."""


class TiledView(torch.Tensor):
    """A parameter in tiles without autograd, or its gradient: what is written to it is written to the tiles."""

    owner: Owner
    of_gradient: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


Face = TiledParameter | TiledView
"""What a parameter in tiles shows of itself."""


class PagedBuffer(torch.Tensor):
    """A buffer outside of its unit's forward. Its class changes; the object stays the same."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary tensor with all its bytes."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        copy: torch.Tensor = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = self.detach().clone()
        return copy.__reduce_ex__(protocol)


class PagedView(torch.Tensor):
    """A tensor that looks into a frame and holds a loan: its page stays where it is for as long as it lives."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


def _getter(name: str) -> Any:
    return getattr(_Tensor, name).__get__


METADATA = {
    _getter(name)
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
        "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes",
        "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "name",
    )
    if hasattr(_Tensor, name)
} | {
    _Tensor.requires_grad.__set__, _Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.nelement, _Tensor.ndimension,
    _Tensor.element_size, _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_inference, _Tensor.requires_grad_,
    _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook, _Tensor.__len__, _Tensor.retain_grad,
    _Tensor.get_device, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference,
    torch.get_device,
}  # fmt: skip
"""What is true of a parameter wherever its bytes are."""

_ESCAPES = {
    _Tensor.numpy, _Tensor.__array__, _Tensor.untyped_storage, _Tensor.storage, _Tensor.__dlpack__, _Tensor.data_ptr,
    _Tensor.__reduce_ex__,
}  # fmt: skip
"""What lets memory out of our sight, where no pin could follow: it gets a copy."""

LAYOUT = {_Tensor.stride, _Tensor.is_contiguous}
"""What a parameter will answer again once its bytes are there."""

_GET_GRAD = _getter("grad")
_SET_GRAD = _Tensor.grad.__set__
_DELETE_GRAD = _Tensor.grad.__delete__
_SET_DATA = _Tensor.data.__set__


_FREEZES = {_Tensor.requires_grad.__set__, _Tensor.requires_grad_}


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        if func in _FREEZES and isinstance(args[0], PagedParameter):
            owner = _owners.get(id(args[0]))
            if owner is not None and (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
                owner.check_trainable(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    tensors = list(_paged(args))
    if kwargs:
        tensors.extend(_paged(tuple(kwargs.values())))
    owner = next((face_owner(tensor) for tensor in tensors if isinstance(tensor, Face)), None)
    if owner is None:
        owner = next((found for tensor in tensors if (found := _owners.get(id(tensor))) is not None), None)
    if owner is None:
        owner = next((_view_owner(tensor) for tensor in tensors if type(tensor) is PagedView), None)
    if owner is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if args and isinstance(args[0], PagedParameter | PagedBuffer) and id(args[0]) in _owners:
        own_ = _owners[id(args[0])]
        if func == _GET_GRAD:
            return own_.gradient(args[0])
        if func == _SET_GRAD:
            return own_.set_gradient(args[0], args[1])
        if func == _DELETE_GRAD:
            return own_.set_gradient(args[0], None)
        if func == _SET_DATA:
            return own_.set_data(args[0], args[1])
        if func in LAYOUT:
            return func(own_.layout(args[0]), *args[1:], **kwargs)
    if func in _ESCAPES:
        copy = owner.touch(
            _Tensor.clone, (args[0].detach() if args[0].requires_grad else args[0],), {}, tensors
        )
        return func(copy, *args[1:], **kwargs)
    return owner.touch(func, args, kwargs, tensors)


def _paged(values: Any) -> Iterator[torch.Tensor]:
    """Parameters, buffers and views of ours in nested arguments."""
    for value in values:
        if isinstance(value, PagedParameter | PagedBuffer | PagedView | TiledView):
            yield value
        elif isinstance(value, list | tuple):
            yield from _paged(value)
        elif isinstance(value, dict):
            yield from _paged(value.values())


def face_owner(tensor: Face) -> Owner:
    """Who has the parameter in tiles that this is, or is a view of."""
    return tensor.owner if isinstance(tensor, TiledView) else _owners[id(tensor)]


def _view_owner(tensor: torch.Tensor) -> Owner | None:
    return cast("Owner | None", borrower_owner(tensor))  # whoever lends a view is one
