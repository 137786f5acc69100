"""1-bit Adam: Adam whose ranks, after a warm-up, exchange the signs of their momenta and not their gradients.

H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021. In
the warm-up it is Adam. Then the second moments are frozen, and each rank makes a momentum of its own gradient, of which
it sends every rank a slice, as one bit an element and one scale; a rank adds up what it gets and sends all the same of
the sum. Both keep what that leaves out, and add it the next time.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from tiermem.hooks import Hooks
from tiermem.trainer.adam import Adam
from tiermem.trainer.compressed import CompressedUpdate
from tiermem.trainer.kernel import Kernel
from tiermem.trainer.moments import AdamUpdate


class OneBitAdam(Adam):
    """Adam for ranks with a slow network: a thirty-second of the bytes, once ``warmup_steps`` steps are over.

    Arguments are those of :class:`Adam`. ``warmup_steps`` (at least 1) are ordinary steps; from then on second moments
    stay what they are, and ``1 - beta2**warmup_steps`` corrects their bias. The paper makes the warm-up 15 to 20 % of
    a training run, until second moments are stable. Elements that had no gradient in it (rows of an embedding) have
    nothing to divide by, and stay what they are but for weight decay.

    It needs ``ranks.stage = 0``, where every rank has all of the state. After the warm-up ``p.grad`` is this rank's
    gradient; ``clip_grad_norm_`` clips each rank's by its own norm, and returns that. Losses aren't those of Adam.

    State per parameter, beside Adam's: ``error`` (float32, likewise), paged as the rest. What a rank has of it is told
    to the others, and becomes the mean, whenever the state is saved (``state_dict``, ``model.save``; all ranks must
    call it): so a run that goes on has the bits of one that is resumed from there, on as many ranks.

    Raises ValueError where there are no other ranks, or at another stage.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        kernel: Kernel | None = None,
    ) -> None:
        if not warmup_steps >= 1:
            raise ValueError(
                f"Invalid warmup_steps: read {warmup_steps}; allowed is 1 or more, as second moments come from it"
            )
        self._warmup_steps = warmup_steps
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            kernel=kernel,
        )

    def _new_update(self, owner: Hooks) -> AdamUpdate:
        partition = owner.reduction.partition
        if owner.reduction.ranks is None:
            raise ValueError("OneBitAdam: no other ranks share the model, and nothing is sent: use Adam")
        if partition.stage != 0:
            raise ValueError(
                f"OneBitAdam: read ranks.stage = {partition.stage}; allowed is 0. At stages 1 to 3 each rank has a "
                "slice of the parameters' updates, and has to send it whole, which is what bits are to spare"
            )
        if owner.commits is not None:
            raise ValueError(
                "OneBitAdam: commits have moments and masters, and not the errors that it keeps: set durability.mode = "
                '"off" (model.save has them)'
            )
        return CompressedUpdate(owner, self, self._warmup_steps)
