"""The door: one thread at a time, again and again; Ctrl-C waits outside."""

# ruff: noqa: PT012  (where an interrupt comes out is what these tests are about)

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tiermem.door import Door


@pytest.fixture(autouse=True)
def handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_the_outermost_exit() -> None:
    door, reached = Door(), []
    with pytest.raises(KeyboardInterrupt):
        with door:
            interrupt()
            reached.append("after the signal")
            with door:
                interrupt()
                reached.append("inside")
            reached.append("between")
        reached.append("outside")
    assert reached == ["after the signal", "inside", "between"]
    with door:
        pass  # told once, and not again


def test_outside_it_strikes_at_once() -> None:
    door = Door()
    with door:
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with door:
        pass


def test_an_error_inside_is_the_interrupts_context() -> None:
    door = Door()
    with pytest.raises(KeyboardInterrupt) as info, door:
        interrupt()
        raise ValueError("inside")
    assert isinstance(info.value.__context__, ValueError)
    with door:
        pass


def test_an_error_inside_opens_the_door() -> None:
    door = Door()
    with pytest.raises(ValueError, match="inside"), door, door:
        raise ValueError("inside")
    assert acquired_by_another(door)


def test_a_handler_of_the_users_is_called_with_the_signal() -> None:
    calls: list[tuple[int, bool]] = []

    def mine(number: int, frame: FrameType | None) -> None:
        calls.append((number, frame is not None))

    before = signal.signal(signal.SIGINT, mine)
    try:
        door = Door()
        with door:
            interrupt()
            assert calls == []
        assert calls == [(signal.SIGINT, True)]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_is_left_alone(ignored: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, ignored)
    try:
        with Door():
            assert signal.getsignal(signal.SIGINT) is ignored
        assert signal.getsignal(signal.SIGINT) is ignored
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_doors_one_in_the_other() -> None:
    outer, inner, reached = Door(), Door(), []
    with pytest.raises(KeyboardInterrupt), outer:
        with inner:
            interrupt()
        reached.append("between")
    assert reached == ["between"]


def test_a_second_interrupt_on_the_way_out_is_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    door, restore = Door(), signal.signal
    struck = []

    def strike(number: int, handler: Any) -> object:
        result = restore(number, handler)
        if handler is signal.default_int_handler:
            monkeypatch.undo()
            struck.append(True)
            interrupt()  # the very moment that the handler is back
        return result

    with pytest.raises(KeyboardInterrupt), door:
        interrupt()
        monkeypatch.setattr("tiermem.door._set_handler", strike)
    assert struck
    with door:
        pass  # nothing left over to raise here
    assert acquired_by_another(door)


def acquired_by_another(door: Door) -> bool:
    inside = []

    def enter() -> None:
        with door:
            inside.append(True)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(10)
    return bool(inside)


def test_other_threads_wait_and_touch_no_signals() -> None:
    door, order, started = Door(), [], threading.Event()
    handlers = []

    def other() -> None:
        started.set()
        with door:
            handlers.append(signal.getsignal(signal.SIGINT))
            with door:
                order.append("other")

    thread = threading.Thread(target=other)
    with door:
        thread.start()
        assert started.wait(10)
        order.append("main")
    thread.join(10)
    assert order == ["main", "other"]
    assert handlers == [signal.default_int_handler]


def test_a_collection_inside_may_come_in_again() -> None:
    door, deaths = Door(), []

    class Cycle:
        pass

    def died(_: object) -> None:
        with door:
            deaths.append(threading.get_ident())

    cycle = Cycle()
    cycle.me = cycle  # type: ignore[attr-defined]
    alive = weakref.ref(cycle, died)
    with pytest.raises(KeyboardInterrupt), door:
        interrupt()
        del cycle
        gc.collect()
        assert deaths == [threading.get_ident()]
    assert alive() is None
    assert acquired_by_another(door)


def test_a_door_made_in_another_thread() -> None:
    doors = []
    thread = threading.Thread(target=lambda: doors.append(Door()))
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt), doors[0]:
        interrupt()
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
