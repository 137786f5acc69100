"""Replay: a plan carried out, one tier at a time, by a cursor.

Each access that begins releases the moves that the plan has for it: writes begin at once, and fetches as soon as their
places are free. Nothing here waits. What can't be had (a page is pinned, a place is taken, the step has departed from
the schedule) is left out or tried again at the next access, and whoever needs the page faults it in.

Note: strays. After a departure, or before the first planned step, pages lie elsewhere than the plan has them. One that
is in the way of a fetch moves to its own place when that is free (a copy in memory), and is evicted otherwise: within
a step everything is where the plan has it.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from tiermem.page import Frame, Page, State
from tiermem.policies import Cursor, Fetch, Plan
from tiermem.room import Room
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import Event, Reason
from tiermem.transfer import ARROW

MAX_TRIES = 16
"""Fetches that are tried again at a time, those that are needed first. There are more when a plan begins."""
SOON = 4
"""Accesses within which what is needed isn't evicted, though it lies where something else should."""


class Waiting:
    """A fetch that could not begin yet: which access needs it, and whether it makes up for something that was lost."""

    __slots__ = ("fetch", "frame", "late", "need", "until")

    def __init__(self, need: int, fetch: Fetch, late: bool) -> None:
        self.need = need
        self.fetch = fetch
        self.late = late
        self.frame: Frame | None = None  # what is in its way
        self.until = -1  # the access up to which that belongs there

    def blocked(self, position: int) -> bool:
        """Is that still there, and can't leave yet? Then it need not be tried again."""
        frame = self.frame
        if frame is None:
            return False
        page = frame.page
        return (page.host is frame or page.device is frame) and (
            page.transfer is not None or page.pins > 0 or self.until == position
        )


class Replay:
    """One tier's plan on its way through the step. Without ``fetches``, pages only come when they are needed."""

    def __init__(self, tier: Tier, room: Room, table: PageTable, fetches: bool = True) -> None:
        self.tier = tier
        self.plan: Plan | None = None
        self.above: Replay | None = None  # of the device, where that has memory of its own
        self._fetches = fetches
        self._room = room
        self._moves = room.transfers
        self._table = table
        self._cursor: Cursor | None = None
        self._due: list[list[Fetch]] = []  # what each access releases when it begins
        self._last: list[
            list[Fetch]
        ] = []  # what each access needs that can't be on its way when the one before begins
        self._ready = -1  # the access of which that has been released, over all steps
        self._length = 0  # of the schedule
        self._done = 0  # accesses whose moves are released, over all steps
        self._waiting: list[Waiting] = []  # what is needed first, first
        self._obstacle: Frame | None = None  # what the last fetch that could not begin found in its place

    def follow(self, cursor: Cursor | None, plan: Plan | None) -> None:
        """From now on go by this plan; what should be resident and isn't, is fetched.

        To go on with the same is an access's end and nothing else: what was lost on the way has been told of, by
        :meth:`lost`.
        """
        if plan is None or cursor is None:
            self._cursor = self.plan = None
            self._waiting.clear()
            return
        if cursor is self._cursor and plan is self.plan:
            self.ended()
            return
        if plan is not self.plan:
            self._sort_out(plan)
        self._cursor, self.plan, self._length = cursor, plan, len(cursor.schedule)
        self._waiting.clear()
        self._done = self._position()
        for index in range(len(plan.stays)):
            self._catch_up(index)

    def _sort_out(self, plan: Plan) -> None:
        """When to release what. There is nothing to do for what never leaves; if it does, by need, that is told of."""
        self._due, self._last = [[] for _ in range(plan.length)], [[] for _ in range(plan.length)]
        for position, fetches in enumerate(plan.fetches if self._fetches else ()):
            for fetch in fetches:
                if plan.stays[fetch.stay].whole:
                    continue
                # On the host, for the device's sake, nobody else fetches what is needed.
                early = fetch.lead or self.above is not None
                (self._due if early else self._last)[position].append(fetch)

    def ended(self) -> None:
        """The access that began last has ended: what the next one needs can be on its way, if its room is free now."""
        if self.plan is None:
            return
        position = self._position()
        if position != self._ready:
            self._ready = position
            for fetch in self._last[position % self._length]:
                self._start(fetch, position)

    def lost(self, page: Page) -> None:
        """The page was evicted by need, not by plan: if the plan still has it, it is fetched again."""
        if self.plan is not None:
            index = self.plan.stay(page.number, (self._position() - 1) % self.plan.length)
            if index is not None:
                self._catch_up(index)

    def _catch_up(self, index: int) -> None:
        """Have a page fetched that is on its way or there, by the plan, and whose turn to be fetched has passed."""
        plan, cursor = self.plan, self._cursor
        assert plan is not None
        assert cursor is not None
        if not self._fetches:
            return
        stay, lead, here = plan.stays[index], plan.leads[index], self._position()
        since = (here - stay.start + lead) % plan.length
        if since >= lead + stay.length:
            return
        need = here + lead - since  # of its first use
        if since > lead:
            # It is there, by the plan. Another use in this stay may be ahead.
            position = here % plan.length
            need = here + cursor.schedule.next_use(stay.page, position) - position
            if need >= here - since + lead + stay.length and not stay.whole:
                return
        page = self._table[stay.page]
        if (page.host if self.tier is self._room.host else page.device) is None or page.leaving:
            fresh = stay.fresh and since <= lead
            fetch = Fetch(stay.page, plan.offsets[index], lead, fresh, index)
            insort(self._waiting, Waiting(need, fetch, True), key=_need)

    def place(self, page: Page) -> int | None:
        """Where the plan has the page now; None when it isn't resident in it, or wherever there is room."""
        if self.plan is None or self._cursor is None:
            return None
        # Between two accesses, the one that has begun last counts.
        return self.plan.place(page.number, (self._position() - 1) % self.plan.length)

    def pump(self) -> None:
        """Release the moves of all accesses that have begun, and begin what can begin."""
        plan = self.plan
        if plan is None:
            return
        position, length = self._position(), self._length
        if position == self._done and not self._waiting:
            return
        begun = range(max(self._done, position - length), position)
        self._done = max(self._done, position) if position > self._done - length else position
        for access in begun:
            for number in plan.writes[access % length]:
                self._write(self._table[number])
        if self._waiting:
            self._try_again(position)
        for access in begun:
            for fetch in self._due[access % length]:
                need = access + fetch.lead
                if need >= position - 1:
                    self._start(fetch, need)

    def _start(self, fetch: Fetch, need: int) -> None:
        there = None if fetch.offset is None else self.tier.slab.at(fetch.offset)
        if there is not None and there.page.leaving and there.page.number != fetch.page:
            self._obstacle = there  # it was in the plan until now, and is being written
        elif self._begin(fetch, False):
            return
        entry = Waiting(need, fetch, False)
        self._note(entry, self._position())
        insort(self._waiting, entry, key=_need)

    def _try_again(self, position: int) -> None:
        entries, self._waiting = self._waiting, []
        left: list[Waiting] = []
        tries = 0
        for index, entry in enumerate(entries):
            if entry.need < position - 1:
                continue  # whoever needed it has it
            if not entry.blocked(position):
                if tries == MAX_TRIES:
                    left += entries[index:]
                    break
                tries += 1
                soon = entry.late and entry.need <= position + SOON
                if self._begin(entry.fetch, soon):
                    continue
                if not entry.late:
                    self._note(entry, position)
            left.append(entry)
        if self._waiting:  # what was evicted meanwhile
            left = sorted(left + self._waiting, key=_need)
        self._waiting = left

    def _note(self, entry: Waiting, position: int) -> None:
        """Keep what was found in the way of a fetch."""
        entry.frame = frame = self._obstacle
        if frame is not None:
            page = frame.page
            # Neither on a journey nor in use: it is the plan that has it there, and until the next access.
            stays = page.transfer is None and not page.pins and page.number not in self._room.held
            entry.until = position if stays else -1

    @property
    def waiting(self) -> bool:
        """Are there fetches whose places were taken when they were last tried?"""
        return bool(self._waiting)

    def _position(self) -> int:
        cursor = self._cursor
        assert cursor is not None
        return cursor.steps * self._length + cursor.position

    def _write(self, page: Page) -> None:
        """Write a page whose stay is over; its frame is free when it has landed."""
        if page.state is State.HOST and page.dirty and not page.pins and not page.spent and page.sinks:
            self._moves.write(page, Reason.PLAN, leaving=True)
            self._moves.log.record(Event.EVICT, page, *ARROW[State.WRITING], Reason.PLAN)

    def _begin(self, fetch: Fetch, late: bool) -> bool:
        """Begin it; whether there is nothing more to do."""
        self._obstacle = None
        page = self._table[fetch.page]
        if page.error is not None:
            return True
        if self.tier is self._room.host:
            return self._begin_on_host(page, fetch, late)
        if page.state is State.HOST and not page.pins:
            frame = self._frame(page, fetch)
            if frame is None:
                return False
            self._moves.load(page, frame, Reason.PLAN)
            self._count(page)
            return True
        return page.state in (State.DEVICE, State.LOADING)

    def _begin_on_host(self, page: Page, fetch: Fetch, late: bool) -> bool:
        if page.state is State.DEVICE and page.host is None and self.above is not None:
            if page.pins or page.device_dirty or self.above.place(page) is not None:
                return False
            self._moves.frames.drop_device(page, Reason.PLAN)  # it is wanted on the host now, from the disk
        if page.host is not None:
            if not page.leaving:
                return True
            if page.host.offset != fetch.offset:
                return False  # on its way out of a place that another page wants
            page.leaving = False  # wanted again before it was gone: its frame stays
            return True
        if not self._moves.shelf.ready(page):
            return False  # not before the optimizer's step is over
        if fetch.fresh and not page.blank:
            # Whoever overwrites it takes a frame then: all there is to do is to free its place.
            return fetch.offset is None or self._clear(page, fetch.offset)
        frame = self._frame(page, fetch)
        if frame is None and late:
            frame = self._elsewhere(page)
        if frame is None:
            return False
        if page.blank:
            self._room.take_blank(page, frame)
        else:
            self._moves.read(page, frame, Reason.PLAN)
            self._count(page)
        return True

    def _frame(self, page: Page, fetch: Fetch) -> Frame | None:
        if fetch.offset is not None and not self._clear(page, fetch.offset):
            return None
        return self._moves.frames.reserve(self.tier, page, Reason.PLAN, fetch.offset)

    def _elsewhere(self, page: Page) -> Frame | None:
        """A frame that can be had at once, for a page whose own place can't be: of what the plan has nowhere."""
        frame = self._moves.frames.reserve(self.tier, page, Reason.PLAN)
        if frame is not None:
            return frame
        strays = [
            frame
            for frame in self.tier.slab
            if frame.page.state is State.HOST and not frame.page.dirty and self.place(frame.page) is None
        ]
        window = self.tier.slab.window(
            page.nbytes, [frame for frame in strays if not self._room.stays(self.tier, frame.page)]
        )
        if window is None:
            return None
        for frame in window:
            self._room.evict(self.tier, frame.page)
        return self._moves.frames.reserve(self.tier, page, Reason.PLAN)

    def _clear(self, page: Page, offset: int) -> bool:
        """Free a page's place of strays; False when that can't be done now."""
        frames = self.tier.slab.between(offset, offset + page.nbytes)
        if not frames:
            return True
        plan, free = self.plan, True
        assert plan is not None
        here = (self._position() - 1) % plan.length
        for frame in frames:
            other = frame.page
            place = plan.place(other.number, here)
            wanted = place is not None and self.missed(other, place, page)
            if not self._room.give_way(self.tier, frame, place, wanted):
                free, self._obstacle = False, frame
        return free

    def missed(self, stray: Page, place: int | None, page: Page) -> bool:
        """Would a stray, which the plan has at ``place`` by now, be missed before ``page``, which it is in the way of?

        It is not if it can be had again in time: it is clean, and not needed at once.
        """
        cursor = self._cursor
        if place is None or cursor is None:
            return False
        need = cursor.schedule.next_use(stray.number, cursor.position)
        return (stray.dirty or need <= cursor.position + SOON) and need <= cursor.schedule.next_use(
            page.number, cursor.position
        )

    def _count(self, page: Page) -> None:
        page.prefetched = True
        self._moves.counters.num_prefetches += 1
        self._moves.log.record(Event.PREFETCH, page, *ARROW[page.state], Reason.PLAN)


_need = attrgetter("need")
