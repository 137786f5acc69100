"""The door: the one lock around every page state, behind which Ctrl-C waits.

Autograd calls hooks from threads of its own, so the pager needs a lock; and a KeyboardInterrupt that arrived
between two lines of a state's change would leave a frame without its page. Inside the door the main thread only
notes the signal, and raises it on the way out. What happens inside is bounded: bookkeeping, and waiting for disk
transfers that were submitted.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# The functions behind the signal module's, which turn numbers into enums and back at ten times the cost; the door is
# passed a few times for each tensor of each step.
_raw: Any = importlib.import_module("_signal")
_set_handler: Callable[..., Any] = _raw.signal
_get_handler: Callable[..., Any] = _raw.getsignal
_SIGINT = int(signal.SIGINT)


class Door:
    """A re-entrant lock, used as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._depth = 0  # of the main thread
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._caught: tuple[int, FrameType | None] | None = None
        self._hold = Hold(self)

    def __enter__(self) -> None:
        self.begin()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        self.end()

    def hold(self) -> Hold:
        """Keep Ctrl-C back without the lock: what is pinned inside is unpinned before it strikes."""
        return self._hold

    @property
    def interrupted(self) -> bool:
        """Is there a signal that was noted, and waits to strike? For whoever waits long inside."""
        return self._caught is not None and threading.get_ident() == self._main

    def checkpoint(self) -> None:
        """Let a noted signal strike here, inside a :meth:`hold`, where everything can be undone."""
        if self._caught is not None and self._handler is not None and threading.get_ident() == self._main:
            caught, self._caught = self._caught, None
            self._handler(*caught)

    def begin(self) -> None:
        """From here on, note signals."""
        if threading.get_ident() == self._main:
            if self._depth == 0:
                current = _get_handler(_SIGINT)
                if callable(current) and current != self._note:
                    # Before the lock, so that there is no moment in which it is held and an interrupt can strike.
                    self._handler = current
                    _set_handler(_SIGINT, self._note)
            self._depth += 1

    def end(self) -> None:
        """Undo one :meth:`begin`; what was noted strikes."""
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            try:
                _set_handler(_SIGINT, handler)
            finally:
                # Also when another one strikes here: it stands for both.
                caught, self._caught = self._caught, None
            if caught is not None:
                handler(*caught)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = (number, frame)


class Hold:
    """See :meth:`Door.hold`; it may be entered again while it is held."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def __enter__(self) -> None:
        self._door.begin()

    def __exit__(self, *exc: object) -> None:
        self._door.end()
