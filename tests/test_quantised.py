"""Weights that aren't floating point, packed ones and buffers: they travel as pages, and not a bit of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, build, same, train

GPT_CASE = BY_NAME["gpt"]
TIERS = pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])


def compatible(what: str, result: str = "equal") -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("Frozen and quantised weights", what, "", result)


class Packed(nn.Module):
    """A frozen linear layer of ``dim`` features in 4 bits, two weights a byte, as parameter or as buffer."""

    def __init__(self, dim: int, as_buffer: bool) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (dim, dim // 2), dtype=torch.uint8)
        if as_buffer:
            self.register_buffer("packed", packed)
        else:
            self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", torch.rand(dim, 1) / dim)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.packed & 15, self.packed >> 4
        weight = (torch.stack([low, high], -1).flatten(1).float() - 7.5) * self.scale
        return F.linear(x, weight.to(x.dtype))


class Small(nn.Module):
    """A frozen linear layer in 8 bits: ``dtype`` int8, or one of the 8-bit floats."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(dim, dim)
        if dtype is torch.int8:
            weight = (weight * 30).clamp(-127, 127)
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) / x.shape[-1])


class Quantised(nn.Module):
    """Frozen quantised layers, each with a small adapter that trains."""

    def __init__(self, make: Any, dim: int = 256) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"base": make(dim), "down": nn.Linear(dim, 4), "up": nn.Linear(4, dim)})
            for _ in range(3)
        )
        self.head = nn.Linear(dim, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = x + layer["base"](x) + layer["up"](layer["down"](x))  # type: ignore[operator,index]
        return self.head(x)


KINDS = {
    "packed in a parameter (uint8)": lambda dim: Packed(dim, False),
    "packed in a buffer (uint8)": lambda dim: Packed(dim, True),
    "int8": lambda dim: Small(dim, torch.int8),
    "float8_e4m3fn": lambda dim: Small(dim, torch.float8_e4m3fn),
    "float8_e5m2": lambda dim: Small(dim, torch.float8_e5m2),
}


@compatible("{kind}")
@TIERS
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_travel_as_pages(kind: str, three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=lambda: Quantised(KINDS[kind]))
    plain = build(case, None)
    bits = {n: t.clone() for n, t in plain.state_dict().items() if t.element_size() == 1}
    assert len(bits) == 3
    model = wrap(build(case, None), host="smallest", device="smallest", three=three)
    paged = {f.name for u in model._runtime.units for g in u.groups for f in g.fields}
    assert set(bits) <= paged
    assert_equal(train(plain, adamw(plain), case, steps=3), train(model, adamw(model), case, steps=3))
    found = model.state_dict()
    for name, value in bits.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    model.close()
    for name, value in model.module.state_dict().items():
        if name in bits:
            assert torch.equal(value.view(torch.uint8), bits[name].view(torch.uint8)), name


@TIERS
@pytest.mark.parametrize("kind", KINDS)
def test_precision_casts_no_quantised_weight(kind: str, three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=lambda: Quantised(KINDS[kind]))
    net = build(case, None)
    bits = {n: t.clone() for n, t in net.state_dict().items() if t.element_size() == 1}
    model = wrap(net, host="smallest", device="smallest", three=three, precision={"parameters": "bfloat16"})
    train(model, adamw(model), case, steps=1)
    for name, value in bits.items():
        found = model.state_dict()[name]
        assert found.dtype is value.dtype
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


@compatible("large buffers that aren't floating point, used from anywhere")
@TIERS
def test_a_buffer_in_a_page_is_used_like_any_other(three: bool, wrap: Wrap, tmp_path: Path) -> None:
    nets = [
        build(GPT_CASE._replace(build=lambda: Quantised(KINDS["packed in a buffer (uint8)"])), None)
        for _ in "ab"
    ]
    plain: Any = nets[0]
    model: Any = wrap(nets[1], host="smallest", device="smallest", three=three)
    for each in (plain, model):
        with torch.no_grad():
            each.layers[0]["base"].packed[3] = 7
            each.layers[1]["base"].packed.fill_(200)
            each.layers[2]["base"].packed = (
                each.layers[2]["base"].packed ^ 255
            )  # a tensor of its own from now on
    for (name, a), (_, b) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), name
        assert torch.equal(a, b)
        assert a.sum().item() == b.sum().item()
    tokens = GPT_CASE.batch()[0]
    assert same(plain(tokens), model(tokens))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    for name, value in plain.state_dict().items():
        assert same(value, loaded[name])
    changed = {n: t.flip(0) for n, t in loaded.items()}
    plain.load_state_dict(changed)
    model.load_state_dict(changed)
    assert same(plain(tokens), model(tokens))
    model._runtime.check()
    model.close()
    assert {type(b) for b in model.buffers()} == {Tensor}
    assert same(plain(tokens), model.module(tokens))


def test_the_budget_counts_buffers_once(wrap: Wrap) -> None:
    net = build(GPT_CASE._replace(build=lambda: Quantised(KINDS["packed in a buffer (uint8)"], 512)), None)
    net.requires_grad_(False)
    packed = sum(b.nbytes for b in net.buffers() if b.dtype is torch.uint8)
    model = wrap(net, host="smallest")
    host = model.stats()["tiers"]["host"]
    assert host["smallest"] < packed
    with torch.no_grad():
        model(GPT_CASE.batch()[0])
    assert model.stats()["tiers"]["host"]["peak"] <= host["budget"]


@compatible("parameters of a class of their own (bitsandbytes, torchao)", "refused")
def test_a_parameter_of_another_class_is_refused_by_name(wrap: Wrap) -> None:
    class Int8Params(nn.Parameter):
        pass

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = Int8Params(net[1].weight.detach())
    with pytest.raises(tiermem.ConfigError, match=r"1\.weight is a Int8Params"):
        wrap(net)
