"""Loss scaling over pages: torch's numbers where torch has them, float32 masters where it refuses, one verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_same, build, snapshot
from tiermem.trainer import AdamW, GradScaler, paged

CASE = BY_NAME["gpt-tied"]
SCALE = 2.0**10


def overflowing(model: nn.Module, step: int) -> Any:
    """In the second step one gradient isn't finite."""
    if step != 1:
        return None

    def spoil(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf"))

    return dict(model.named_parameters())["h.1.mlp.0.weight"].register_hook(spoil)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_float32_parameters_under_autocast_have_torch_s_bits(three: bool, clip: bool, wrap: Wrap) -> None:
    ends = []
    for model in (build(CASE), wrap(build(CASE), host="smallest", device="smallest", three=three)):
        tiered = isinstance(model, tiermem.TieredModule)
        optimizer = adamw(model)
        scaler = (GradScaler if tiered else torch.amp.GradScaler)("cpu", init_scale=SCALE, growth_interval=2)
        torch.manual_seed(0)
        told: list[Any] = []
        for step in range(5):
            hook = overflowing(model, step)
            with torch.autocast("cpu", torch.float16):
                loss = CASE.loss(model, CASE.batch())
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                clipping: Any = model.clip_grad_norm_ if tiered else None
                norm = clipping(0.1) if tiered else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                told.append(norm.nan_to_num().item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told += [loss.item(), scaler.get_scale()]
            if hook is not None:
                hook.remove()
        ends.append((told, dict(model.state_dict()), snapshot(optimizer)))
    assert ends[0][0] == ends[1][0]
    assert SCALE / 2 in ends[1][0]
    assert_same("state", ends[0][1], ends[1][1])
    assert_same("moments", ends[0][2], ends[1][2])


@pytest.mark.parametrize("clip", [False, True])
def test_float16_parameters_are_divided_in_float32(clip: bool, wrap: Wrap) -> None:
    """The reference: float32 masters, whose gradients are the float16 ones divided in float32."""
    case = BY_NAME["gpt"]
    plain, model = build(case, torch.float16), wrap(build(case, torch.float16), host="smallest")
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    optimizers = AdamW(masters, lr=3e-3), AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(init_scale=SCALE, growth_interval=2)
    scale = torch.tensor(SCALE)
    torch.manual_seed(0)
    for step in range(5):
        batch = case.batch()
        hooks = [overflowing(each, step) for each in (plain, model)]
        losses = [case.loss(each, batch) for each in (plain, model)]
        assert torch.equal(*losses)
        (losses[0] * scaler.get_scale()).backward()
        scaler.scale(losses[1]).backward()
        for master, p in zip(masters, plain.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float() / scaler.get_scale()
        finite = all(bool(p.grad.isfinite().all()) for p in masters if p.grad is not None)
        assert finite == (step != 1)
        if clip:
            scaler.unscale_(optimizers[1])
            norms = torch.nn.utils.clip_grad_norm_(masters, 0.1), model.clip_grad_norm_(0.1)
            assert torch.allclose(*norms, rtol=1e-6, equal_nan=True)
        if finite:
            optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        plain.zero_grad()
        optimizers[1].zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, plain.parameters(), strict=True):
                p.copy_(master)
        for hook in hooks:
            if hook is not None:
                hook.remove()
        scale.fill_(scaler.get_scale())
    assert scale == SCALE  # halved once, doubled once
    found = dict(model.state_dict())
    for (name, p), q in zip(plain.named_parameters(), masters, strict=True):
        assert torch.equal(p, found[name]) or (clip and torch.allclose(p, found[name], rtol=1e-3)), name
        assert not torch.equal(p.float(), q)  # the masters have digits that rounding hides


def test_what_can_not_be_had_is_refused(wrap: Wrap) -> None:
    model = wrap(build(CASE, torch.float16))
    other = paged(torch.optim.SGD, model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(CASE.loss(model, CASE.batch())).backward()
    with pytest.raises(ValueError, match=r"is float16, and unscaled in float16 it would lose"):
        scaler.step(other)
    model = wrap(build(CASE))
    during = adamw(model, during_backward=True)
    scaler.scale(CASE.loss(model, CASE.batch())).backward()
    with pytest.raises(tiermem.PagingError, match="during_backward=False"):
        GradScaler.unscale_(scaler, during)
