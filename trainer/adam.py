"""Adam and AdamW on the CPU, with float32 masters for half-precision parameters.

They stand in for ``torch.optim.Adam`` and ``torch.optim.AdamW``: same arguments, formulas, parameter groups,
schedulers and state dicts. What is added: bfloat16 and float16 parameters are updated through a float32
master and float32 moments, in one pass over memory by :class:`~tiermem.trainer.kernel.Kernel`.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tiermem.dtensors import is_dtensor
from tiermem.hooks import Hooks
from tiermem.parameter import owner_of
from tiermem.trainer.base import Exact, PagingOptimizer, pieces_of
from tiermem.trainer.delayed import Delayed, DelayedUpdate, require_delayable
from tiermem.trainer.during import DuringBackward
from tiermem.trainer.kernel import Hyper, Kernel
from tiermem.trainer.moments import AdamUpdate

__all__ = ["Adam", "AdamW"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TAKES = "this Adam takes float32, bfloat16, float16"
_FLOAT32_STATE = ("exp_avg", "exp_avg_sq", "master", "error")


class Adam(PagingOptimizer):
    """Adam (Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015).

    ``params`` are tensors, named tensors or parameter groups, dense, on the CPU, of float32, bfloat16 or
    float16 and any shape and strides. ``lr`` (a float or a tensor of one element), ``betas``, ``eps``,
    ``weight_decay`` and ``maximize`` mean what they mean in ``torch.optim.Adam``; ``decoupled_weight_decay``
    makes it :class:`AdamW`. ``amsgrad`` is not offered.

    ``kernel`` lends the optimizer threads; whoever lends it closes it. Without one the optimizer makes its
    own at the first step, with ``torch.get_num_threads()`` threads, which end when the optimizer is
    collected.

    ``during_backward``: of a :class:`tiermem.TieredModule`, update a unit as soon as backward has left it and its
    gradients are complete, and give them up, so that they never go to the disk and back. ``step()`` does the rest, and
    must follow each backward that isn't in ``model.no_sync()``. The numbers are the same. Clipping and loss scaling,
    which need all gradients before the first update, and several ranks are refused; a backward that raises an error
    leaves what it had updated.

    ``delayed``: of a :class:`tiermem.TieredModule`, make the update of a step while the next one's backward runs, which
    computes with the parameters of the step before (ZeRO-Offload's one-step delayed update). **The numbers are other
    ones.** The first ``undelayed_steps`` updates are made at once, while gradients change fast. Gradients are the
    optimizer's from ``step()`` on (``p.grad`` is None), and may be clipped and scaled. :meth:`settle` makes what is
    pending; so do ``state_dict``, ``save``, ``load`` and ``close``. Parameters that aren't paged are updated at once.
    Refused: several ranks, durable runs, ``during_backward``.

    State per parameter: ``step`` (float32 scalar), ``exp_avg`` and ``exp_avg_sq`` (float32, the parameter's
    shape and strides) and, unless the parameter is float32, ``master`` (float32, likewise). So a float32
    parameter costs 8 bytes per element of state, a half-precision one 12.

    Raises ValueError for a setting out of range (as torch does) or a parameter of another dtype or device,
    and RuntimeError for a gradient that is not dense.

    Note: whose value counts. The master starts as the parameter and from then on the parameter is the master,
    rounded. When somebody else writes the parameter (a checkpoint is loaded, weights are clipped or tied),
    the parameter is what they see and so what counts: at the next step each element whose master no longer
    rounds to the parameter is taken from the parameter, and the others keep the digits that rounding hides.
    So loading a model and its optimizer, in either order, loses nothing. Writes are noticed by the tensor's
    version and address; a write through ``parameter.data`` changes neither, so write under
    ``torch.no_grad()`` instead.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        kernel: Kernel | None = None,
        during_backward: bool = False,
        delayed: bool = False,
        undelayed_steps: int = 40,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if not 0.0 <= betas[0] < 1.0:
            raise ValueError(f"Invalid beta parameter at index 0: {betas[0]}")
        if not 0.0 <= betas[1] < 1.0:
            raise ValueError(f"Invalid beta parameter at index 1: {betas[1]}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if delayed and during_backward:
            raise ValueError(
                "delayed=True and during_backward=True say different things of when updates are made"
            )
        if not undelayed_steps >= 0:
            raise ValueError(f"Invalid undelayed_steps: read {undelayed_steps}; allowed is 0 or more")
        self._kernel = kernel
        self.during_backward = during_backward
        self.delayed = delayed
        self._undelayed_steps = undelayed_steps
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._paged: dict[Hooks, AdamUpdate] = {}  # for each wrapped model among the parameters
        defaults = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    @property
    def kernel(self) -> Kernel:
        """The kernel that makes the updates: the one lent, or the optimizer's own."""
        if self._kernel is None:
            self._kernel = Kernel()
        return self._kernel

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by copy, pickle and load_state_dict. A copy makes threads of its own, and no parameter counts
        # as seen: the state may belong to other values than the parameters have now.
        for group in state["param_groups"]:
            if group.get("amsgrad", False):
                raise ValueError("the state was saved with amsgrad=True, which tiermem's Adam doesn't offer")
        super().__setstate__(state)
        self.__dict__.setdefault("_kernel", None)
        self.__dict__.setdefault("_paged", {})
        self.__dict__.setdefault("during_backward", False)
        self.__dict__.setdefault("delayed", False)
        self.__dict__.setdefault("_undelayed_steps", 0)
        self._seen = {}
        for group in self.param_groups:
            group.setdefault("maximize", False)
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
        for values in self.state.values():
            for name, value in values.items():
                if isinstance(value, Exact):
                    values[name] = value.tensor
            if "step" in values:
                values["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of this class or of ``torch.optim.Adam``/``AdamW`` returned.

        Moments and masters stay (or become) float32 whatever the parameter's dtype; state saved without a
        master gets one from the parameter at the next step.
        """
        # torch casts a parameter's state to the parameter's dtype, but only tensors: ours travel wrapped.
        self._load(state_dict, _wrap_float32_state)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each parameter that has a gradient; ``closure`` is called first, and its loss returned."""
        # Not under no_grad, whose exit a Ctrl-C can miss, with gradients off for good: detached tensors are worked on.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._find_paged()
        for group in self.param_groups:
            self._step_plain(group, (p for p in group["params"] if owner_of(p) is None))
        for update in self._paged.values():
            update.step(*self.with_what())
        return loss

    def updates_of(self, parameter: Tensor) -> int | None:
        """How many updates a parameter has had whose state is in pages; None for any other.

        Raises PagingError when the model of paged parameters has been closed.
        """
        self._find_paged()
        update = self._update_of(parameter)
        return update.updates_of(pieces_of(parameter)[0]) if isinstance(update, AdamUpdate) else None

    def set_updates(self, parameter: Tensor, count: int) -> None:
        """Say how many updates the state has had that somebody wrote into a parameter's pages."""
        update = self._update_of(parameter)
        if isinstance(update, AdamUpdate):
            for piece in pieces_of(parameter):
                update.set_updates(piece, count)

    def _update_for(self, owner: Hooks) -> AdamUpdate:
        known = self._paged.get(owner)
        if known is not None:
            return known
        self._paged[owner] = update = self._new_update(owner)
        return update

    def _new_update(self, owner: Hooks) -> AdamUpdate:
        if not (self.during_backward or self.delayed):
            return AdamUpdate(owner, self)
        named = "delayed=True" if self.delayed else "during_backward=True"
        if owner.reduction.ranks is not None:
            raise ValueError(
                f"{named}: {owner.reduction.ranks.world} ranks share the model, and a gradient is complete only "
                "when all of them have given theirs, as parameters are needed until all have left them: leave it out"
            )
        if owner.updater is not None:
            raise ValueError(f"{named}: another optimizer updates this model during backward already")
        if not self.delayed:
            update = AdamUpdate(owner, self)
            owner.updater = DuringBackward(update)
            return update
        require_delayable(owner)
        delayed = DelayedUpdate(owner, self, self._undelayed_steps)
        owner.updater = Delayed(delayed)
        return delayed

    def beside(self, parameter: Tensor) -> tuple[str, ...]:
        """What its state has in pages beside moments and masters: names in ``Group.states``."""
        update = self._update_of(parameter)
        return update.beside if isinstance(update, AdamUpdate) else ()

    def settle(self) -> None:
        """Make parameters and state what they are after the last step: with ``delayed``, its update is made now.

        Raises PagingError in the middle of a forward or backward.
        """
        for update in self._paged.values():
            if not update.hooks.views.closed:
                update.settle()

    def with_what(self) -> tuple[Kernel, list[Hyper]]:
        """The kernel and each parameter group's settings, as they are now."""
        return self.kernel, [hyper_of(group) for group in self.param_groups]

    def _admit(self, parameter: Tensor) -> None:
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: {_TAKES}")

    def _step_plain(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        """Update those of ``parameters`` that have gradients, each an ordinary tensor on the CPU."""
        hyper = hyper_of(group)
        for p in parameters:
            if p.grad is not None:
                self._update(p, p.grad, hyper)

    def _update(self, p: Tensor, gradient: Tensor, hyper: Hyper) -> None:
        _refuse_unsupported(p, gradient)
        # The kernel walks memory, so all its spans need one order of elements: that of `values`, which is the
        # parameter itself unless it has gaps.
        own = p.detach()
        values = own if _is_dense(own) else own.contiguous()
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(values, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(values, dtype=torch.float32)
        state["exp_avg"] = exp_avg = _ordered_like(values, state["exp_avg"])
        state["exp_avg_sq"] = exp_avg_sq = _ordered_like(values, state["exp_avg_sq"])
        master = self._fresh_master(p, values, state)
        gradient = _ordered_like(values, gradient.detach().resolve_neg())

        step = int(state["step"]) + 1
        self.kernel.update(
            parameter=values.data_ptr(),
            parameter_dtype=values.dtype,
            gradient=gradient.data_ptr(),
            gradient_dtype=gradient.dtype,
            master=0 if master is None else master.data_ptr(),
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            count=values.numel(),
            hyper=hyper,
            step=step,
        )
        state["step"].fill_(step)
        if values is own:
            torch.autograd.graph.increment_version(p)  # a graph that saved p must notice, as after any write
        else:
            own.copy_(values)
        self._seen[p] = (p._version, p.data_ptr())

    def _fresh_master(self, p: Tensor, values: Tensor, state: dict[str, Any]) -> Tensor | None:
        """The master of ``p``, ordered like ``values`` and agreeing with it; None for float32."""
        if p.dtype == torch.float32:
            return None
        master: Tensor | None = state.get("master")
        if master is None:
            master = values.to(torch.float32, copy=True)
        else:
            master = _ordered_like(values, master)
            if self._seen.get(p) != (p._version, p.data_ptr()):  # see Note: whose value counts
                torch.where(master.to(values.dtype) == values, master, values.float(), out=master)
        state["master"] = master
        return master


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, "Decoupled Weight Decay Regularization",
    ICLR 2019).

    Arguments, state and errors are :class:`Adam`'s; ``weight_decay`` multiplies the parameter by
    ``1 - lr * weight_decay`` instead of being added to the gradient, and is 0.01 unless given.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        kernel: Kernel | None = None,
        during_backward: bool = False,
        delayed: bool = False,
        undelayed_steps: int = 40,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=True,
            kernel=kernel,
            during_backward=during_backward,
            delayed=delayed,
            undelayed_steps=undelayed_steps,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # also when what was loaded is Adam's


def _wrap_float32_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def wrap(name: str, value: Any) -> Any:
        return Exact(value.detach().to("cpu", torch.float32, copy=True)) if name in _FLOAT32_STATE else value

    state = {
        number: {name: wrap(name, value) for name, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def hyper_of(group: dict[str, Any]) -> Hyper:
    """The settings of a parameter group, as the kernel takes them."""
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )


def _refuse_unsupported(p: Tensor, gradient: Tensor) -> None:
    if is_dtensor(p):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is a DTensor: the kernel walks memory, and takes the local parts "
            "of one that is paged; wrap its module in a TieredModule, and make the optimizer of model.parameters() then"
        )
    if p.device.type != "cpu" or gradient.device.type != "cpu":
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is on {p.device}, its gradient on {gradient.device}: "
            "this Adam updates tensors on the CPU; keep the parameter there, or in a tiered module"
        )
    if p.dtype not in _DTYPES:
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is {p.dtype}: {_TAKES}")
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has a gradient of layout {gradient.layout}: Adam does "
            "not support sparse gradients; make it dense (for an embedding, sparse=False)"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, each once, in whatever order."""
    # preserve_format keeps the strides of exactly such tensors
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _ordered_like(values: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, or a copy whose elements lie in memory in the order of those of the dense ``values``."""
    if tensor.stride() == values.stride() or (tensor.is_contiguous() and values.is_contiguous()):
        return tensor
    return torch.empty_like(values, dtype=tensor.dtype).copy_(tensor)
