"""Parameters seen and written from outside of the model's forward, and of several dtypes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, same, train
from tiermem.trainer import AdamW

GPT_CASE = BY_NAME["gpt"]


def moved(model: tiermem.TieredModule) -> tuple[dict[str, Any], int]:
    """Bytes that every link has carried, and how many faults there were."""
    stats = model.stats()
    return stats["links"], stats["faults"]


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_what_is_known_of_a_parameter_moves_no_byte(three: bool, wrap: Wrap) -> None:
    net = build(BY_NAME["views"])
    model = wrap(build(BY_NAME["views"]), host="smallest", device="smallest", three=three)
    model._runtime.pager.transfers.drain()  # of the wrapping itself
    before = moved(model)
    for p, q in zip(net.parameters(), model.parameters(), strict=True):
        assert isinstance(q, nn.Parameter)
        assert (p.shape, p.size(), p.dtype, p.device) == (q.shape, q.size(), q.dtype, q.device)
        assert (p.numel(), p.dim(), p.ndim, len(p)) == (q.numel(), q.dim(), q.ndim, len(q))
        assert (p.requires_grad, p.is_leaf, p.grad) == (q.requires_grad, q.is_leaf, q.grad)
        assert (p.element_size(), p.nbytes, p.layout) == (q.element_size(), q.nbytes, q.layout)
        assert (p.is_floating_point(), p.is_complex(), p.is_cuda) == (q.is_floating_point(), False, False)
        assert p.itemsize == q.itemsize
        assert hash(q) == hash(q)
        assert isinstance(id(q), int)
    sum(p.numel() for p in model.parameters() if p.requires_grad)
    repr(model)
    list(model.named_modules())
    AdamW(model.parameters())
    assert moved(model) == before


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_parameters_are_read_from_outside(three: bool, wrap: Wrap) -> None:
    net = build(GPT_CASE)
    model = wrap(build(GPT_CASE), host="smallest", device="smallest", three=three)
    for (name, p), q in zip(net.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(q, p), name
        assert torch.equal(q.data, p.data)
        assert torch.equal(q.detach(), p.detach())
        assert q.sum().item() == p.sum().item()
        assert q.flatten()[3].item() == p.flatten()[3].item()
        assert (q.detach().numpy() == p.detach().numpy()).all()
        assert q.tolist() == p.tolist()
        assert repr(q) == repr(p)
        assert same(q.detach().clone().as_subclass(Tensor), p.detach())
        assert same(q.cpu().detach().double().as_subclass(Tensor), p.detach().double())
        assert torch.equal(q.T if q.dim() == 2 else q, p.T if p.dim() == 2 else p)
        model._runtime.check()
    with pytest.raises(tiermem.BudgetError, match="let go"):
        nn.utils.parameters_to_vector(model.parameters())  # it holds views of all of them at one time
    model._runtime.check()
    copied = copy.deepcopy(model.head.weight)
    assert type(copied) is nn.Parameter
    assert same(copied.data, net.head.weight.data)
    assert same(pickle.loads(pickle.dumps(model.head.weight)).data, net.head.weight.data)


def _write(model: Any, through_data: bool) -> None:
    """What people do to parameters between steps."""
    with torch.no_grad():
        model.head.weight.clamp_(-0.05, 0.05)
        model.h[0].mlp[0].weight.mul_(0.9)
        model.h[1].ln1.weight.copy_(torch.full((48,), 0.8))
        model.h[0].ln1.bias[2:5] = 0.25
        model.wte.weight[3].zero_()
        model.h[2].mlp[2].weight.t()[1].add_(0.125)
    if through_data:
        model.h[1].mlp[0].bias.data.fill_(0.125)
        model.h[2].mlp[0].weight.data = model.h[2].mlp[0].weight.data * 0.5
        model.wpe.weight.data[0] += 1
    nn.init.normal_(model.h[1].mlp[2].weight, std=0.02)
    nn.init.zeros_(model.h[0].attention.proj.bias)
    nn.init.xavier_uniform_(model.h[0].attention.qkv.weight)


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parameters_are_written_from_outside(dtype: torch.dtype, three: bool, wrap: Wrap) -> None:
    # An unwrapped optimizer of bfloat16 doesn't notice a write through .data (see Adam's note); a paged one does.
    data = dtype is torch.float32
    ends = []
    for model in (
        build(GPT_CASE, dtype),
        wrap(build(GPT_CASE, dtype), host="smallest", device="smallest", three=three),
    ):
        torch.manual_seed(1)
        _write(model, data)
        ends.append(train(model, adamw(model), GPT_CASE, steps=3, after=lambda _, m=model: _write(m, data)))
    assert_equal(*ends)


def test_an_average_of_the_weights(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        average = [p.detach().clone() for p in model.parameters()]

        def update(step: int, model: nn.Module = model, average: list[Tensor] = average) -> None:
            with torch.no_grad():
                for a, p in zip(average, model.parameters(), strict=True):
                    a.lerp_(p, 0.1)

        train(model, adamw(model), GPT_CASE, steps=3, after=update)
        ends.append({i: a.as_subclass(Tensor) for i, a in enumerate(average)})
    assert_same("average", *ends)


class Mixed(nn.Module):
    """Parameters of several dtypes: an int table, a frozen double, half precision beside float32."""

    def __init__(self, double_trains: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(0, 67, (67, 3)), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(67).double(), requires_grad=double_trains)
        self.wte = nn.Embedding(67, 48)
        self.low = nn.Linear(48, 96).to(torch.bfloat16)
        self.high = nn.Linear(96, 67)
        self.empty = nn.Parameter(torch.zeros(3, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(self.table[tokens]).mean(2)
        x = self.low(x.to(torch.bfloat16)).float()
        return self.high(x) * self.scale[tokens].unsqueeze(-1).float()


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_a_model_of_mixed_dtypes(three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=Mixed)
    plain = build(case, None)
    model = wrap(build(case, None), host="smallest", device="smallest", three=three)
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_what_the_optimizer_cannot_update_is_refused(wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = wrap(Mixed(double_trains=True), host="1GiB")
    with pytest.raises(ValueError, match="float64"):
        AdamW(model.parameters())
