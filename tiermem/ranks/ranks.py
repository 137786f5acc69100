"""Ranks: what one process asks of the others that train the same model.

Note: threads. The main thread (and autograd's) ask, and wait. A *reader* hears what the coordinator has decided; a
*mover* carries it out, in the order of the decisions, without any lock of the pager's, so that a rank which waits or
computes never keeps the others from what they need of it. A *feeder* waits for the disk where a gather begins with a
read. None of them changes where a page is.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import torch

from tiermem.errors import RanksError
from tiermem.ranks.coordinator import CLOSE, STEP, Message
from tiermem.ranks.exchange import Exchange, Term
from tiermem.ranks.held import SMALL_NBYTES, Held
from tiermem.ranks.request import Request
from tiermem.ranks.wire import Connection, Server

AWHILE = 3.0
"""Seconds in which the coordinator hears of a process's end, and says so."""

HOLD = 0.02
"""Seconds after which what waits for more of its kind is said, whatever else happens."""

Read = Callable[[int, int, torch.Tensor], None]
"""Puts bytes of this rank's slice of a page into memory: the page's key, the first byte, the memory (uint8)."""


class Ranks:
    """This process among the ranks. :meth:`close` ends its threads and connections.

    ``timeout`` in seconds is how long one wait may take. ``slices`` are the sizes in bytes of a rank's slice of each
    page, by key.
    """

    def __init__(
        self,
        connection: Connection,
        server: Server | None,
        exchange: Exchange,
        slices: Sequence[int],
        timeout: float,
    ) -> None:
        self.rank = exchange.rank
        self.world = exchange.world
        self.near = (
            exchange.near
        )  # the ranks that have the slices of a page between them, this one among them
        self.place = exchange.place  # of this one in these: which slice it has
        self.exchange = exchange
        self.stepping = False  # between the beginning of the optimizer's step and its end
        self.read: Read = _unread
        self.interrupted: Callable[[], bool] = lambda: False
        self._connection = connection
        self._server = server
        self._slices = slices
        self._timeout = timeout
        self._failure: RanksError | None = None
        self._failing = threading.Event()
        self._leaving = False
        self._lock = threading.Lock()  # around the two below
        self._joined: dict[str, Request] = {}
        self._gathers: dict[
            int, tuple[Request, torch.Tensor]
        ] = {}  # page -> what is wanted, into which frame
        self._moving: list[Request] = []  # what the mover is at
        self._met: dict[str, int] = {}  # how often all have met, by why
        self._decisions: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._feeds: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._held = Held(exchange.piece)
        self._saying = threading.Lock()  # so that messages come in the order in which they are said
        self._threads = [
            threading.Thread(target=run, name=f"tiermem-ranks-{name}", daemon=True)
            for name, run in (("reader", self._hear), ("mover", self._move), ("feeder", self._feed))
        ]
        for thread in self._threads:
            thread.start()

    # -- asking -------------------------------------------------------------------------------------------

    def offer(self, pages: Iterable[tuple[int, int]]) -> None:
        """This rank's slices of these pages, (key, version), can be read from now on, by the others too."""
        offered = list(pages)
        if offered:
            self._say(["offer", offered])

    def gather(self, key: int, version: int, frame: torch.Tensor, wait: Callable[[], None] | None) -> Request:
        """Ask for a whole page in ``frame`` (its bytes), in which this rank's slice is, or will be after ``wait``.

        What ``wait`` raises is the request's error.
        """
        request = Request(f"want {key}")
        with self._lock:
            if self._failure is not None:
                request.end(self._failure)
                return request
            assert key not in self._gathers, f"page {key} is being gathered already"
            self._gathers[key] = request, frame

        def post() -> None:
            try:
                if wait is not None:
                    wait()
            except Exception as error:
                with self._lock:
                    self._gathers.pop(key, None)
                request.end(error)
                return
            self._say(["want", key, version], past=True)
            request.posted.set()

        if wait is None:
            post()
        else:
            self._feeds.put(post)
        return request

    def reduce(self, key: int, number: int, term: Term, patience: int = 0) -> Request:
        """Give a page (or nothing) to the sum of all ranks' ``number``-th one, whose own slice goes to its target.

        See :meth:`Exchange.reduce`. It may be returned. So many accesses as ``patience`` says, a small one may wait
        for others to go together with it.
        """
        request = Request(f"reduce {key} {number}", term=term)
        return self._join(request, term.page is not None, key, patience)

    def scatter(self, why: str, outgoing: torch.Tensor, incoming: torch.Tensor) -> Request:
        """Send each rank its row of ``outgoing``, and have the others' for this one in ``incoming`` (bytes)."""

        def run(tag: int, payloads: list[Any]) -> None:
            self.exchange.scatter(why, outgoing, incoming, tag)

        return self._join(Request(self._numbered(why), run), None)

    def share(self, why: str, whole: torch.Tensor, own: tuple[int, int]) -> Request:
        """Fill ``whole`` (one dimension) with the elements that each rank has: this one within ``own``."""

        def run(tag: int, bounds: list[Any]) -> None:
            self.exchange.share(whole, [(start, stop) for start, stop in bounds], tag)

        return self._join(Request(self._numbered(why), run), list(own))

    def meet(self, why: str, payload: Any = None, reason: str = "") -> list[Any]:
        """Wait until all ranks are here, with the same ``why``; returns what each of them brought (JSON).

        Raises RanksError when that can't happen, or doesn't within the timeout.
        """
        request = self._join(Request(self._numbered(why)), payload)
        if why == STEP:
            self.stepping = True
        self.wait(request, reason or why)
        return request.payloads

    def _numbered(self, why: str) -> str:
        number = self._met[why] = self._met.get(why, 0) + 1
        return f"{why} {number}"

    def _join(self, request: Request, payload: Any, key: int = 0, patience: int = 0) -> Request:
        with self._lock:
            if self._failure is not None:
                request.end(self._failure)
                return request
            self._joined[request.name] = request
        self._say_soon(request, ["join", request.name, payload], key, patience)
        return request

    def _say_soon(self, request: Request, message: Message, key: int, patience: int) -> None:
        """Say it now, or together with others of its kind."""
        if patience <= 0 or self._slices[key] > SMALL_NBYTES:
            self._say(message)
        else:
            with self._held.lock:
                first = not self._held
                now = self._held.add(message, self._slices[key], patience)
            if now:
                self.flush()
            elif first:
                self._feeds.put(_nothing)  # which has the feeder look at the clock
        request.posted.set()

    def tick(self) -> None:
        """An access has begun."""
        if self._held.tick():
            self.flush()

    def flush(self) -> None:
        """Say what waits for more of its kind."""
        self._say()

    def _say(self, *messages: Message, past: bool = False) -> None:
        """Say these, after what is held; ``past``: that goes on waiting."""
        try:
            with self._saying:
                said = [*(() if past else self._held.take()), *messages]
                if said:
                    self._connection.send(said)
        except OSError as error:
            self._fail(
                RanksError(f"the connection to the first rank has ended: {error.strerror or error}", 0)
            )

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, request: Request, reason: str) -> None:
        """Block until it has ended; ``reason`` says in words what this rank is doing, if it never does.

        Raises its error; KeyboardInterrupt when one is noted meanwhile, with the request still under way.
        """
        end = monotonic() + self._timeout
        pause = 0.001  # until it is posted: who waits for a page not yet asked for isn't blocked by others
        said = late = False
        page = request.name.startswith("want ")
        if not page:
            self.flush()
        while not request.ended.wait(pause):
            if self.interrupted():
                self._say(["free"])
                raise KeyboardInterrupt
            if self._failure is not None and not request.ended.wait(1):
                raise self._failure  # it may be that bytes still come
            if not said and request.posted.is_set():
                said, pause = True, 0.1
                if not request.decided:
                    # Who waits for a page needs nothing of its own to get it, so gradients may go on waiting.
                    self._say(["blocked", request.name, reason], past=page)
            if not late and monotonic() > end:
                late, end = True, monotonic() + 10
                self._say(["late", self._timeout])
            elif late and monotonic() > end:
                self._fail(RanksError(f"rank {self.rank} has waited {self._timeout:g} seconds in {reason}"))
        if request.error is not None:
            raise request.error

    def check(self) -> None:
        """Raise what has ended the ranks, if something has."""
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Can the ranks not go on?"""
        return self._failure is not None

    # -- the threads --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        while True:
            try:
                messages = self._connection.receive()
            except OSError as error:
                if not self._leaving:
                    self._fail(RanksError(f"rank 0 is gone, or the network to it is down ({error})", 0))
                self._decisions.put(None)
                return
            for message in messages:
                if message[0] == "error":
                    self._fail(RanksError(message[1], message[2]))
                elif message[0] == "return":
                    with self._lock:
                        request = self._joined.pop(message[1], None)
                    if request is not None:
                        request.returned = True
                        request.end()
                else:
                    self._decided(message)
                    self._decisions.put(message)

    def _decided(self, message: Message) -> None:
        if message[0] == "together":
            for each in message[1]:
                self._decided(each)
            return
        with self._lock:
            if message[0] == "done" and message[1] in self._joined:
                self._joined[message[1]].decided = True
            elif message[0] == "gather" and self.rank in message[3] and message[1] in self._gathers:
                self._gathers[message[1]][0].decided = True

    def _move(self) -> None:
        posted: deque[tuple[Request, list[Any]]] = deque()
        try:
            while True:
                try:
                    message = self._decisions.get(block=not posted)
                except queue.Empty:
                    self._finish(*posted.popleft())
                    continue
                if message is None:
                    return
                if message[0] == "gather":
                    self._gather(message, posted)
                    continue
                while posted:
                    self._finish(*posted.popleft())
                self._carry_out(message[1] if message[0] == "together" else [message])
        except Exception as error:  # of the process group, or of the disk that a slice is read from
            # That another process has died shows here as well; whose it was, the coordinator hears.
            if not self._failing.wait(AWHILE):
                self._say(["fail", f"an exchange failed: {error}"])
                self._failing.wait(AWHILE)
            self._fail(RanksError(f"rank {self.rank}: an exchange failed: {error}", self.rank))
            for request in self._moving:
                request.end(self._failure)

    def _gather(self, message: Message, posted: deque[tuple[Request, list[Any]]]) -> None:
        _, key, tag, ranks = message
        if self.rank not in ranks:
            self.exchange.serve(
                lambda start, piece: self.read(key, start, piece), self._slices[key], ranks, tag
            )
            return
        with self._lock:
            entry = self._gathers.pop(key, None)
        if entry is not None:
            request, frame = entry
            request.begin()
            self._moving.append(request)
            posted.append((request, self.exchange.gather(frame, ranks, tag)))

    def _finish(self, request: Request, works: list[Any]) -> None:
        for work in works:
            work.wait()
        self._moving.remove(request)
        request.end()

    def _carry_out(self, messages: list[Message]) -> None:
        with self._lock:
            entries = [self._joined.pop(message[1], None) for message in messages]
        requests = [entry for entry in entries if entry is not None]
        if len(requests) < len(messages):
            return  # the ranks have failed meanwhile
        tags = [message[2] for message in messages]
        for request, message in zip(requests, messages, strict=True):
            request.payloads = message[3]
            request.begin()
        self._moving += requests
        first = requests[0]
        if len(requests) > 1:
            terms = [request.term for request in requests if request.term is not None]
            self.exchange.reduce_together(terms, [request.payloads for request in requests], tags)
        elif first.term is not None:
            self.exchange.reduce(*first.term, first.payloads, tags[0])
        elif first.run is not None:
            first.run(tags[0], first.payloads)
        for request in requests:
            self._moving.remove(request)
            request.end()

    def _feed(self) -> None:
        while True:
            try:
                post = self._feeds.get(timeout=HOLD if self._held else None)
            except queue.Empty:
                # Whoever holds something may be waiting for another rank that waits for it, and we can't know.
                self.flush()
                continue
            if post is None:
                return
            post()

    def _fail(self, error: RanksError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            ended = [*self._joined.values(), *(request for request, _ in self._gathers.values())]
            self._joined.clear()
            self._gathers.clear()
        self._failing.set()
        for request in ended:
            request.end(self._failure)

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        """Tell the others that this rank won't go on, because of an error; they raise it as RanksError."""
        if self._failure is None:
            self._say(["fail", why])
            self._failing.wait(AWHILE)

    def close(self) -> None:
        """Wait until all ranks close, or it is over with them, then end threads and connections; idempotent."""
        if self._leaving:
            return
        try:
            if not self.failed:
                self.meet(CLOSE, reason="close()")
        except (RanksError, KeyboardInterrupt) as error:
            self.leave(str(error) or type(error).__name__)
        finally:
            self._leaving = True
            if self._server is not None and self.failed:
                self._server.abandon()
            self._connection.shut()
            self._feeds.put(None)
            # An exchange with a rank that hangs can't be broken off: its thread ends with its process group.
            for thread in self._threads:
                thread.join(5 if self.failed else None)
            self._connection.close()
            if self._server is not None:
                self._server.close()


def _nothing() -> None:
    """What a feeder is woken with."""


def _unread(key: int, start: int, piece: torch.Tensor) -> None:
    raise AssertionError("a slice was asked for before there were any")
