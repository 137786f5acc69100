"""DTensors: parameters of which tensor parallelism has given this process a part, and the parts, which are paged.

``torch.distributed.tensor.parallel`` makes a module's parameters DTensors. While the module is wrapped, what it has in
the place of each is the *local* part, an ordinary parameter that is paged like any other. Inside of a forward that uses
it the module has a DTensor again, made of the part: so it is torch that says what is computed where and exchanged with
whom, and the gradient arrives at the part reduced as the placement asks. At the end the module has its own DTensors
back, with the parts as they are then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError, PagingError
from tiermem.parameter import METADATA, PagedParameter


def is_dtensor(value: Any) -> bool:
    """Is it a DTensor? Where nobody has imported them there are none, and importing them takes a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def take_apart(tensor: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A DTensor's local part, and what makes it again of such a part. Neither is part of a graph."""
    detached = tensor.detach()
    return detached._local_tensor, partial(_put_together, type(detached), detached._spec)


def _put_together(kind: Any, spec: Any, local: torch.Tensor) -> Any:
    return kind(local, spec, requires_grad=False)


class Local:
    """The local part of one DTensor parameter, which ``places`` of the module have: (module, name)."""

    def __init__(self, name: str, whole: Any) -> None:
        self.name = name
        self.places: list[tuple[nn.Module, str]] = []
        self.mesh: Any = whole.device_mesh
        self.placements: tuple[Any, ...] = tuple(whole.placements)
        self.size, self.stride = whole.size(), whole.stride()
        with torch.no_grad():
            local = whole.to_local().detach()
        if any(placement.is_partial() for placement in self.placements):
            raise ConfigError(
                f"parameter {name} is a DTensor placed {self.placements}: a sum that is still to be made can't be "
                "paged; redistribute it to Shard or Replicate before"
            )
        if not local.numel():
            raise ConfigError(
                f"parameter {name} of shape {list(self.size)} is placed {self.placements} on {self.mesh}, where this "
                f"process has nothing of it: shard it over fewer processes than it has rows"
            )
        self.parameter = nn.Parameter(local, whole.requires_grad)
        if whole.grad is not None:
            self.parameter.grad = self.part_of(whole.grad)
        self._whole = whole
        self._kind = type(whole)

    @property
    def sharded(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which processes have different parts."""
        return tuple(index for index, each in enumerate(self.placements) if not each.is_replicate())

    def take(self) -> None:
        """Put the part into the module, in the DTensor's place, which lets go of its memory."""
        fill = float("nan") if self.parameter.dtype.is_floating_point else 0
        absent = torch.full((), fill, dtype=self.parameter.dtype, device=self.parameter.device)
        self._whole.grad = None
        self._whole._local_tensor = absent.expand(self.parameter.shape)
        self._whole.__class__ = _replaced()
        for module, name in self.places:
            module._parameters[name] = self.parameter

    def give_back(self) -> None:
        """Put the DTensor back, with the part and its gradient as they are."""
        self.hide()
        whole, local = self._whole, self.parameter.detach()
        whole.__class__ = self._kind
        if whole.dtype is local.dtype:
            whole._local_tensor = local
        else:  # a policy's precision is for good
            whole = nn.Parameter(self.like(local), self.parameter.requires_grad)
        whole.grad = None if self.parameter.grad is None else self.like(self.parameter.grad)
        for module, name in self.places:
            module._parameters[name] = whole

    # -- in forward ---------------------------------------------------------------------------------------

    def show(self) -> None:
        """Have the module compute with a DTensor, of the part as it is bound now."""
        # Whoever is inside of no_grad() may share it with somebody who isn't.
        with torch.inference_mode(False), torch.enable_grad():
            whole = self.like(self.parameter)
        for module, name in self.places:
            module.__dict__[name] = whole  # found before the module's parameters are

    def hide(self) -> None:
        """The module has the part again."""
        for module, name in self.places:
            module.__dict__.pop(name, None)

    def like(self, local: torch.Tensor) -> Any:
        """A DTensor of this parameter's shape and placement."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.size, stride=self.stride
        )

    # -- as a state ---------------------------------------------------------------------------------------

    def part_of(self, value: Any) -> torch.Tensor:
        """This process's part of a DTensor, or of a whole tensor, that is to be its value; else it as it is."""
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            if is_dtensor(value):
                if value.device_mesh != self.mesh:
                    return self.part_of(value.full_tensor())
                local: torch.Tensor = value.redistribute(self.mesh, self.placements).to_local()
                return local.detach()
            if isinstance(value, torch.Tensor) and value.size() == self.size:
                whole: Any = distribute_tensor(value.detach(), self.mesh, self.placements, src_data_rank=None)
                local = whole.to_local()
                return local.detach()
        return value  # type: ignore[no-any-return]  # whoever loads it says what is wrong with it


class DTensors:
    """The DTensor parameters of ``net``. Raises ConfigError, naming it, for one whose part can't be paged."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.locals: dict[int, Local] = {}  # by the id of the part
        self._handles: list[Any] = []
        found: dict[int, Local] = {}
        for path, module in net.named_modules():
            for name, parameter in module._parameters.items():
                if is_dtensor(parameter):
                    local = found.get(id(parameter))
                    if local is None:
                        local = found[id(parameter)] = Local(f"{path}.{name}" if path else name, parameter)
                    local.places.append((module, name))
        self.locals = {id(local.parameter): local for local in found.values()}

    def take(self) -> None:
        """Put the parts into the module. ``state_dict`` has DTensors all the same, and takes them."""
        for local in self.locals.values():
            local.take()
            for module, name in local.places:
                save: Any = module._register_state_dict_hook
                load: Any = module._register_load_state_dict_pre_hook
                self._handles += [save(partial(_saved, local, name)), load(partial(_loaded, local, name))]

    def give_back(self) -> None:
        """Undo :meth:`take`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for local in self.locals.values():
            local.give_back()

    def among(self, parameters: Iterable[torch.Tensor]) -> list[Local]:
        """Those of these parameters that are parts."""
        if not self.locals:
            return []
        return [self.locals[id(each)] for each in parameters if id(each) in self.locals]

    def shown(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Arguments of a call on parts; where one of them is a DTensor, the parts are as well."""
        from torch.utils._pytree import tree_any, tree_map_only

        if not self.locals or not tree_any(is_dtensor, (args, kwargs)):
            return args, kwargs

        def like(each: nn.Parameter) -> Any:
            local = self.locals.get(id(each))
            return each if local is None else local.like(each)

        changed: tuple[Any, Any] = tree_map_only(nn.Parameter, like, (args, dict(kwargs)))
        return changed


def _saved(local: Local, name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    value = state.get(prefix + name)
    if isinstance(value, torch.Tensor) and not isinstance(value, PagedParameter | nn.Parameter):
        state[prefix + name] = local.like(value)


def _loaded(local: Local, name: str, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + name in state:
        state[prefix + name] = local.part_of(state[prefix + name])


@cache
def _replaced() -> Any:
    """The class of a DTensor whose part is paged: whoever uses it has an optimizer that would train nothing."""
    from torch.distributed.tensor import DTensor

    class Replaced(DTensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            raise PagingError(
                "this DTensor was a parameter of a module that has been wrapped since, and its local part has taken "
                "its place: make the optimizer of model.parameters(), after wrapping"
            )

    return Replaced
