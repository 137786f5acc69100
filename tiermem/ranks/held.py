"""Held messages: what a rank gives of small gradients waits for more of the kind, and goes together.

A message, a decision and an exchange cost about the same however small a page is. What is said together is decided
together, and is summed in one exchange.
"""

from __future__ import annotations

import threading

from tiermem.ranks.coordinator import Message

SMALL_NBYTES = 1 << 16
"""Bytes of a slice up to which it is worth waiting for others of the kind."""


class Held:
    """Messages about at most ``limit`` bytes of slices. From any thread."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._messages: list[Message] = []
        self._nbytes = 0
        self._patience = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, message: Message, nbytes: int, patience: int) -> bool:
        """Hold a message about ``nbytes`` for ``patience`` accesses at most; returns whether it is time. Locked."""
        self._patience = min(self._patience, patience) if self._messages else patience
        self._messages.append(message)
        self._nbytes += nbytes
        return self._nbytes >= self._limit or self._patience <= 0

    def tick(self) -> bool:
        """An access has begun; returns whether it is time."""
        with self.lock:
            self._patience -= 1
            return bool(self._messages) and self._patience <= 0

    def take(self) -> list[Message]:
        """What was held, and isn't any more."""
        with self.lock:
            messages, self._messages = self._messages, []
            self._nbytes = 0
            return messages
