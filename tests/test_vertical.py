"""Vertical accumulation: the bits of one micro-batch after the other, and parameters that are paged once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import GPT, Block
from tests.parity import adamw, assert_same, snapshot
from tiermem.trainer import AdamW

Chain = list[Callable[[Any], Any]]


def sequence(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(67, 48), *(Block(48) for _ in range(depth)), nn.Linear(48, 67))


def gpt(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return GPT(tied=tied)


def chain_of(net: Any) -> Chain:
    def embed(tokens: Tensor) -> Tensor:
        return net.wte(tokens) + net.wpe(torch.arange(tokens.shape[1]))

    def end(x: Tensor) -> Tensor:
        return net.head(net.ln_f(x))

    return [embed, *net.h, end]


def batches(count: int, step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    data = [torch.randint(67, (2, 9), generator=generator) for _ in range(count)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in data]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()) / 3


def train(model: Any, count: int = 3, chain: Chain | None = None, **settings: Any) -> tuple[Any, Any, Any]:
    optimizer = adamw(model, **settings)
    losses = []
    for step in range(4):
        given = batches(count, step)
        if isinstance(model, tiermem.TieredModule):
            losses += model.accumulate(given, loss_fn, chain=chain)
            model._runtime.check()
            model.clip_grad_norm_(0.5) if not settings else None
        else:
            for value, target in given:
                loss = loss_fn(model(value), target)
                loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5) if not settings else None
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return dict(enumerate(losses)), state, snapshot(optimizer)


@pytest.mark.parametrize(
    ("host", "three", "sections"),
    [
        ("smallest", False, {}),
        (0.4, True, {}),
        (0.5, False, {"placement": {"activations": "disk", "activation_size": "1KiB"}}),
        ("1GiB", False, {}),
    ],
)
def test_the_bits_are_those_of_one_after_the_other(host: Any, three: bool, sections: Any, wrap: Wrap) -> None:
    expected = train(sequence())
    found = train(wrap(sequence(), host=host, device="smallest", three=three, **sections))
    for name, a, b in zip(("losses", "state", "optimizer"), expected, found, strict=True):
        assert_same(name, a, b)


def test_a_chain_that_is_named(wrap: Wrap) -> None:
    expected = train(gpt())
    net = gpt()
    found = train(wrap(net, host=0.4), chain=chain_of(net))
    for name, a, b in zip(("losses", "state", "optimizer"), expected, found, strict=True):
        assert_same(name, a, b)


def test_weights_of_several_links_are_equal_up_to_the_order_of_sums(wrap: Wrap) -> None:
    expected = train(gpt(tied=True))
    net = gpt(tied=True)
    found = train(wrap(net, host=0.4), chain=chain_of(net))
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-4)


def test_updates_during_backward(wrap: Wrap) -> None:
    plain = sequence()
    expected = train(plain, during_backward=True)
    found = train(wrap(sequence(), host=0.4), during_backward=True)
    for name, a, b in zip(("losses", "state", "optimizer"), expected, found, strict=True):
        assert_same(name, a, b)


def nbytes_read(model: Any, count: int, accumulation: str) -> int:
    """Bytes of parameters that the fifth step reads from the disk."""
    optimizer = AdamW(model.parameters())
    before = 0
    for number in range(5):
        before = model.stats()["links"]["disk_to_host"].get("parameter", 0)
        model.accumulate(batches(count, number), loss_fn, accumulation=accumulation)
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats()["departures"] == 0
    return int(model.stats()["links"]["disk_to_host"]["parameter"] - before)


def test_parameters_are_paged_once_for_all_micro_batches(wrap: Wrap) -> None:
    read = {
        (accumulation, count): nbytes_read(wrap(sequence(), host=0.15), count, accumulation)
        for accumulation in ("vertical", "horizontal")
        for count in (2, 6)
    }
    # What the disk is doing decides of a page or two whether it is still there.
    assert 0 < read["vertical", 6] < 1.1 * read["vertical", 2]
    assert read["horizontal", 6] > 2 * read["vertical", 6]


def test_what_isnt_a_chain_is_refused(wrap: Wrap) -> None:
    net = gpt()
    model = wrap(net)
    with pytest.raises(tiermem.ConfigError, match="a GPT isn't a chain that can be seen"):
        model.accumulate(batches(2, 0), loss_fn)
    with pytest.raises(tiermem.ConfigError, match="they must be what the forward calls"):
        model.accumulate(batches(2, 0), loss_fn, chain=chain_of(net)[:1] + chain_of(net)[2:])
    with pytest.raises(tiermem.ConfigError, match="allowed are modules and functions"):
        model.accumulate(batches(2, 0), loss_fn, chain=[])
    with pytest.raises(tiermem.ConfigError, match="no micro-batches"):
        model.accumulate([], loss_fn)
    with pytest.raises(tiermem.ConfigError, match=r'allowed are "vertical" and "horizontal"'):
        model.accumulate(batches(2, 0), loss_fn, accumulation="diagonal")  # type: ignore[arg-type]
    model._runtime.check()
    losses = model.accumulate(batches(2, 0), loss_fn, accumulation="horizontal")
    expected = gpt()
    for (value, target), loss in zip(batches(2, 0), losses, strict=True):
        own = loss_fn(expected(value), target)
        own.backward()
        assert torch.equal(own, loss)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
