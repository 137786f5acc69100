"""Loans: pins of pages that tensors hold for as long as they live.

A tensor may die anywhere: between two lines of a Ctrl-C handler, in a thread that whoever holds the door waits for.
So its death runs no Python of ours, in which an interrupt would be lost and a lock would wait for itself: the loan
appends itself to a queue, and counts as returned when somebody next looks at pins.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import torch


class Pinned(Protocol):
    """What a tensor can hold in its place: a page."""

    pins: int


_loans: dict[int, Loan] = {}  # the id of a tensor -> what tells its death


class Loan(weakref.ref[torch.Tensor]):
    """One pin of ``page``, passed on to a tensor that ``owner`` pages."""

    __slots__ = ("identity", "owner", "page")

    identity: int
    owner: object
    page: Pinned


class Loans:
    """The pins that the tensors of one wrapped model hold."""

    def __init__(self) -> None:
        self._returned: deque[Loan] = deque()

    def lend(self, tensor: torch.Tensor, page: Pinned, owner: object) -> None:
        """Pass one pin of ``page`` on to ``tensor``."""
        loan = Loan(tensor, self._returned.append)
        loan.identity, loan.owner, loan.page = id(tensor), owner, page
        _loans[loan.identity] = loan

    def collect(self) -> None:
        """Count the pins of tensors that have died. Under the door."""
        while self._returned:
            loan = self._returned.popleft()
            loan.page.pins -= 1
            if _loans.get(loan.identity) is loan:  # a later tensor may have the same id
                del _loans[loan.identity]


def borrower_owner(tensor: torch.Tensor) -> object | None:
    """Who pages what this tensor looks into; None for one that holds no loan."""
    loan = _loans.get(id(tensor))
    return loan.owner if loan is not None and loan() is tensor else None
