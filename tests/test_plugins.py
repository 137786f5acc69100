"""Eviction policies of users: found by name, and unable to break anything."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, build, reference, train
from tiermem.errors import ConfigError
from tiermem.policies import LRU, NEVER, Cursor, Eviction, eviction
from tiermem.policies.conformance import PolicyTests


class Newest(LRU):
    """A sound policy: what was used last goes first."""

    def order(self) -> Iterator[int]:
        return reversed(list(super().order()))


class Liar:
    """Names what isn't there, twice, and leaves out what is."""

    def __init__(self) -> None:
        self._known: list[int] = []

    def follow(self, cursor: Cursor | None) -> None:
        pass

    def used(self, page: int) -> None:
        pass

    def admitted(self, page: int) -> None:
        self._known.append(page)

    def removed(self, page: int) -> None:
        pass  # it doesn't forget

    def order(self) -> Iterator[Any]:
        yield from (-1, 10**9, "page", None)
        yield from random.Random(0).sample(self._known, len(self._known) // 2)

    def next_use(self, page: int) -> Any:
        return "soon" if page % 2 else NEVER


class Bomb(Liar):
    """Raises after a while, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = 40

    def admitted(self, page: int) -> None:
        self.fuse -= 1
        if self.fuse < 0:
            raise RuntimeError("boom")
        super().admitted(page)


class Endless(Liar):
    """Never comes to an end, and never names a page that is there."""

    def order(self) -> Iterator[Any]:
        return (-number for number in itertools.count(1))


class Gambler(LRU):
    """Draws from the generators that training draws from."""

    def order(self) -> Iterator[int]:
        pages = list(super().order())
        random.shuffle(pages)
        return iter([pages[index] for index in torch.randperm(len(pages)).tolist()])


class Needy(LRU):
    def __init__(self, size: int) -> None:
        super().__init__()


class Unborn(Liar):
    def __init__(self) -> None:
        raise OSError("no such model")


class Half:
    def follow(self, cursor: Cursor | None) -> None:
        pass


class TestGuarded(PolicyTests):
    """The guard changes nothing of a sound policy."""

    def make(self) -> Eviction:
        return eviction("tiermem.policies:LRU")


@pytest.mark.parametrize("name", ["Newest", "Liar", "Bomb", "Unborn", "Endless"])
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_no_policy_changes_a_number(
    name: str, three: bool, wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    case = BY_NAME["gpt"]
    with caplog.at_level(logging.WARNING, logger="tiermem"):
        model = wrap(
            build(case), host=0.4, device=0.5, three=three, policy={"eviction": f"tests.test_plugins:{name}"}
        )
        assert_equal(reference(case.name), train(model, adamw(model), case))
    told = [record.message for record in caplog.records if f"tests.test_plugins:{name}" in record.message]
    assert bool(told) == (name != "Newest")
    if name in ("Bomb", "Unborn", "Endless"):
        assert any("least recently used takes its place" in line for line in told)
    assert len(told) <= 8, told  # once for each time it is made, not for each page


def test_what_a_policy_draws_training_does_not_notice(wrap: Wrap) -> None:
    def losses(policy: str) -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout()) for _ in range(6))
        )
        model = wrap(net, host=0.4, policy={"eviction": policy, "units": ["*.0"]})
        optimizer = adamw(model)
        found = []
        for _ in range(4):
            loss = (model(torch.ones(2, 32)) * random.random()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert model.stats()["evictions"] > 0
        model.close()
        return found

    assert losses("tests.test_plugins:Gambler") == losses("lru")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.test_plugins:Half", "lacks used, admitted, removed, order, next_use"),
        ("tests.test_plugins:Needy", "can't be made without arguments: missing a required argument: 'size'"),
        ("tests.test_plugins:Nobody", "has no attribute 'Nobody'"),
        ("no_such_module:Class", "No module named 'no_such_module'"),
    ],
)
def test_what_can_not_be_had_is_refused_by_name(name: str, words: str, wrap: Wrap) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        wrap(build(BY_NAME["gpt"]), host=0.4, policy={"eviction": name})
    assert name in str(refused.value)
    assert "policy.eviction" in str(refused.value)
