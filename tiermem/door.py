"""The door: the one lock around every page state, behind which Ctrl-C waits.

Autograd calls hooks from threads of its own, so the pager needs a lock; and a KeyboardInterrupt that arrived
between two lines of a state's change would leave a frame without its page. Inside the door the main thread only
notes the signal, and raises it on the way out. What happens inside is bounded: bookkeeping, and waiting for disk
transfers that were submitted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Door:
    """A re-entrant lock, used as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._depth = 0  # of the main thread
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            if self._depth == 0:
                current = signal.getsignal(signal.SIGINT)
                if callable(current) and current != self._note:
                    # Before the lock, so that there is no moment in which it is held and an interrupt can strike.
                    self._handler = current
                    signal.signal(signal.SIGINT, self._note)
            self._depth += 1
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self._depth == 0 and self._handler is not None:
                handler, self._handler = self._handler, None
                try:
                    signal.signal(signal.SIGINT, handler)
                finally:
                    # Also when another one strikes here: it stands for both.
                    caught, self._caught = self._caught, None
                if caught is not None:
                    handler(*caught)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = (number, frame)
