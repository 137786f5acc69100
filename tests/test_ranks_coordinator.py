"""The coordinator alone: in whatever order ranks speak, all that can be decided is, and what can't is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.ranks.coordinator import Coordinator, Decision, Message


def told(coordinator: Coordinator, *said: tuple[int, Message]) -> list[Message]:
    return [message for rank, each in said for _, message in coordinator.hear(rank, each)]


def offered(world: int, *pages: int) -> Coordinator:
    coordinator = Coordinator(world, [f"the parameters of unit {page}" for page in range(8)])
    for rank in range(world):
        coordinator.hear(rank, ["offer", [[page, 0] for page in pages]])
    return coordinator


def test_what_all_want_is_gathered_at_once() -> None:
    assert told(offered(2, 5), (0, ["want", 5, 0]), (1, ["want", 5, 0])) == [["gather", 5, 1, [0, 1]]]


def test_what_some_want_is_gathered_when_it_has_been_waited_for_long_enough() -> None:
    coordinator = offered(3, 5)
    assert told(coordinator, (1, ["want", 5, 0])) == []
    assert coordinator.impatient
    assert coordinator.hurry() == [(range(3), ["gather", 5, 1, [1]])]
    assert not coordinator.impatient


def test_a_page_of_another_version_is_waited_for() -> None:
    coordinator = offered(2, 5)
    assert told(coordinator, (0, ["offer", [[5, 1]]]), (0, ["want", 5, 1])) == []
    assert not coordinator.impatient
    assert told(coordinator, (1, ["offer", [[5, 1]]]), (1, ["want", 5, 1])) == [["gather", 5, 1, [0, 1]]]


def test_a_step_takes_offers_back() -> None:
    coordinator = offered(2, 5)
    told(coordinator, (0, ["join", "step 1", None]), (1, ["join", "step 1", None]))
    told(coordinator, (0, ["offer", [[5, 1]]]), (0, ["want", 5, 1]))
    assert not coordinator.impatient


def test_contributions_are_returned_when_nobody_could_go_on_otherwise() -> None:
    coordinator = offered(2)
    decided = told(
        coordinator,
        (0, ["join", "reduce 1 1", True]),
        (1, ["join", "reduce 2 1", True]),
        (0, ["blocked", "reduce 1 1", "backward"]),
        (1, ["blocked", "reduce 2 1", "backward"]),
    )
    assert decided == [["return", "reduce 1 1"], ["return", "reduce 2 1"]]
    assert not coordinator.failed


def test_a_page_that_is_only_prefetched_does_not_hide_that_nobody_can_go_on() -> None:
    coordinator = offered(2, 5)
    decided = told(
        coordinator,
        (0, ["join", "reduce 1 1", True]),
        (0, ["blocked", "reduce 1 1", "backward"]),
        (0, ["want", 5, 0]),
        (1, ["join", "settle 1", None]),
        (1, ["blocked", "settle 1", "optimizer.step()"]),
    )
    assert decided == [["gather", 5, 1, [0]], ["return", "reduce 1 1"]]


def test_waits_that_can_not_end_are_named() -> None:
    coordinator = offered(2)
    ((_, (what, text, rank)),) = [
        each
        for rank, message in [
            (0, ["join", "norm 1", None]),
            (1, ["join", "step 1", None]),
            (0, ["blocked", "norm 1", "clip_grad_norm_()"]),
            (1, ["blocked", "step 1", "optimizer.step()"]),
        ]
        for each in coordinator.hear(rank, message)
    ]
    assert (what, rank) == ("error", None)
    assert "rank 0 waits in clip_grad_norm_() for rank 1" in text
    assert "rank 1 waits in optimizer.step() for rank 0" in text


def test_the_rank_that_does_otherwise_is_named() -> None:
    coordinator = offered(3, 5)
    told(coordinator, *((rank, ["join", "step 1", None]) for rank in (0, 2)), (1, ["want", 5, 3]))
    told(coordinator, *((rank, ["blocked", "step 1", "step()"]) for rank in (0, 2)))
    ((_, (_, text, rank)),) = coordinator.hear(1, ["blocked", "want 5", "forward"])
    assert rank == 1
    assert (
        "rank 1 waits in forward for version 3 of the parameters of unit 5, of which rank 0 has version 0"
        in text
    )


def test_a_rank_that_is_gone_ends_all_once() -> None:
    coordinator = offered(3)
    ((ranks, (what, text, rank)),) = coordinator.lost(2, "the connection was closed")
    assert (list(ranks), what, rank) == ([0, 1, 2], "error", 2)
    assert text.startswith("rank 2 is gone")
    assert coordinator.lost(1, "") == coordinator.hear(0, ["want", 1, 1]) == []


@given(st.data())
def test_whatever_the_order_every_rank_gets_what_it_waits_for(data: st.DataObject) -> None:
    """Ranks go through scripts of gathers and meetings in which only meetings are the same for all."""
    world = data.draw(st.integers(2, 4))
    pages = st.lists(st.integers(0, 3), max_size=3, unique=True)
    scripts = []
    for _ in range(world):
        script: list[str] = []
        for meeting in range(3):
            script += [f"want {page}" for page in data.draw(pages)] + [f"settle {meeting}"]
        scripts.append(script)
    coordinator = offered(world, 0, 1, 2, 3)
    waiting: dict[int, str] = {}

    def deliver(decisions: list[Decision]) -> None:
        for ranks, message in decisions:
            assert message[0] in ("gather", "done"), message
            assert list(ranks) == list(range(world))
            name = f"want {message[1]}" if message[0] == "gather" else message[1]
            for rank in message[3] if message[0] == "gather" else ranks:
                assert waiting.pop(rank) == name

    while any(scripts) or waiting:
        ready = [rank for rank in range(world) if scripts[rank] and rank not in waiting]
        assert ready, f"nobody can go on: {coordinator.describe()}"
        rank = data.draw(st.sampled_from(ready))
        name = waiting[rank] = scripts[rank].pop(0)
        ask = ["want", int(name[5:]), 0] if name.startswith("want ") else ["join", name, None]
        deliver(coordinator.hear(rank, ask))
        if waiting.get(rank) == name:
            deliver(coordinator.hear(rank, ["blocked", name, "a test"]))
        if data.draw(st.booleans()):
            deliver(coordinator.hurry())


def test_a_script_that_only_some_follow_fails() -> None:
    coordinator = offered(2)
    told(coordinator, (0, ["join", "step 1", None]), (0, ["blocked", "step 1", "optimizer.step()"]))
    decided = told(coordinator, (1, ["join", "close 1", None]), (1, ["blocked", "close 1", "close()"]))
    assert [message[0] for message in decided] == ["error"]
    assert "rank 1 waits in close() for rank 0" in decided[0][1]


@pytest.mark.parametrize("first", [0, 1])
def test_lateness_says_what_each_rank_does(first: int) -> None:
    coordinator = offered(2)
    told(coordinator, (first, ["join", "step 1", None]), (first, ["blocked", "step 1", "optimizer.step()"]))
    ((_, (_, text, _)),) = coordinator.hear(first, ["late", 30])
    assert f"rank {first} waits in optimizer.step() for rank {1 - first}" in text
    assert f"rank {1 - first} computes" in text
