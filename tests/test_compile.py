"""torch.compile within units: the same bits as the compiled model that isn't paged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Wrap
from tests.models import BY_NAME, GPT, Case
from tests.parity import Outcome, adamw, assert_equal, build, same, train

GPT_CASE = BY_NAME["gpt"]


def compatible(what: str, result: str = "equal") -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("torch.compile", what, "", result)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Nothing compiled is left over from other tests, or for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def run(case: Case, backend: Any, wrap: Wrap | None, three: bool = False, **policy: Any) -> Outcome:
    """Train with compiled units: those that paging has, paged or not."""
    net = build(case)
    if wrap is None:
        for module in [net.wte, *getattr(net, "h", []), net.head]:  # type: ignore[misc]
            module.compile(backend=backend)
        return train(net, adamw(net), case, steps=3)
    model = wrap(net, host="smallest", device="smallest", three=three, **policy)
    model.compile(backend=backend)
    return train(model, adamw(model), case, steps=3)


@compatible("model.compile(): within units")
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("name", ["gpt", "gpt-tied", "gpt-checkpoint"])
def test_units_compile(name: str, three: bool, wrap: Wrap) -> None:
    case = BY_NAME[name]
    backend = Counting()
    assert_equal(run(case, "aot_eager", None), run(case, backend, wrap, three))
    assert backend.graphs


@compatible("units within units: a graph break, not an error")
def test_units_in_units_break_the_graph_and_no_more(wrap: Wrap) -> None:
    backend = Counting()
    policy = {"units": ["h.*", "h.*.mlp", "wte", "head"]}
    assert_equal(run(GPT_CASE, "aot_eager", None), run(GPT_CASE, backend, wrap, policy=policy))
    assert backend.graphs >= 3


@compatible("torch.compile(model), and of the module before it is wrapped")
@pytest.mark.parametrize("when", ["outside", "before", "before, in place"])
def test_compiled_by_torch_itself(when: str, wrap: Wrap) -> None:
    backend = Counting()
    case = GPT_CASE._replace(build=lambda: GPT(depth=1))
    plain: Any = build(case)
    net: Any = build(case)
    if when == "before":
        net = torch.compile(net, backend=backend)
    elif when == "before, in place":
        net.compile(backend=backend)
    model: Any = wrap(net, host="smallest")
    call = torch.compile(model, backend=backend) if when == "outside" else model
    tokens = GPT_CASE.batch()[0]
    for _ in range(2):
        expected, found = plain(tokens), call(tokens)
        assert same(expected, found)
        expected.sum().backward()
        found.sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert backend.graphs
    model._runtime.check()


@pytest.mark.slow
@compatible("the inductor backend")
def test_inductor(wrap: Wrap) -> None:
    # What is compiled together is rounded together, so the units have to be the modules that the other run compiles:
    # the smallest budget would cut blocks in two.
    policy = {"units": ["wte", "h.*", "head"]}
    assert_equal(run(GPT_CASE, "inductor", None), run(GPT_CASE, "inductor", wrap, policy=policy))


def test_close_takes_what_was_compiled_away(wrap: Wrap) -> None:
    net = build(GPT_CASE)
    model = wrap(net, host="smallest")
    model.compile(backend="aot_eager")
    model.compile(backend="aot_eager")  # again: with other settings, say
    train(model, adamw(model), GPT_CASE, steps=1)
    model.close()
    assert all("forward" not in vars(module) for module in net.modules())
    tokens = GPT_CASE.batch()[0]
    assert net(tokens).shape == (3, 16, 67)


class Own(nn.Linear):
    """A module whose forward somebody replaced on the instance."""


def test_a_forward_of_the_instance_s_own_comes_back(wrap: Wrap) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def doubled(x: Tensor) -> Tensor:
        return nn.functional.linear(x, net[0].weight) * 2

    net[0].forward = doubled  # type: ignore[method-assign,assignment]
    x = torch.ones(2, 8)
    expected = net(x)
    model = wrap(net, policy={"units": ["0", "1"]})
    model.compile(backend="aot_eager")
    assert torch.equal(model(x), expected)
    model.close()
    assert net[0].forward is doubled
