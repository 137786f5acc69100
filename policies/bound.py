"""The bound: fewer bytes than this no plan, and nobody else, can move over a tier's link in a step.

Belady's rule is optimal where all pages are of one size and none has to be written; with sizes and writes the smallest
number of bytes is NP-hard to find (M. Chrobak, G. Woeginger, K. Makino and H. Xu, "Caching is hard, even in the fault
model", Algorithmica 63, 2012). What is found here is the smallest of a problem in which pages may be kept by the byte,
a linear program: whatever can be done to whole pages can be done there, so the true least isn't below it. The proof is
in docs/policies.md.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiermem.policies.residency import Uses
from tiermem.policies.schedule import Effect, Schedule

MAX_COUNTED = 1000
"""Accesses over which what is kept is limited. A step of very many has more, and the bound is a little lower for it."""


def bound(
    schedule: Schedule,
    sizes: Mapping[int, int],
    capacity: int,
    *,
    fixed: Collection[int] = (),
    stuck: Collection[int] = (),
) -> int:
    """Bytes that have to be loaded and written, together, in each step of a tier of ``capacity`` bytes.

    The mean over many steps that are all ``schedule``, whoever decides, and however much is known. Arguments as for
    `compile_plan`. Raises ValueError where what an access needs, or what is stuck, exceeds the capacity.
    """
    uses = Uses(schedule, sizes, fixed, stuck)
    room = capacity - uses.needed()
    if len(room) and room.min() < 0:
        raise ValueError(f"an access needs {capacity - int(room.min())} bytes at once, of {capacity}")
    gaps, always = _gaps(uses)
    if not gaps:
        return always
    least = _least(gaps, _epochs(uses, gaps), room)
    return max(always, int(np.ceil(always + least)))


class _Gap(NamedTuple):
    """From one use of a page to its next, if what it holds until then is needed."""

    page: int
    use: int
    start: int
    """The position of the use that begins it."""
    length: int
    """Accesses from that to the one that ends it."""
    nbytes: int
    stuck: bool


def _gaps(uses: Uses) -> tuple[list[_Gap], int]:
    """All gaps over which it helps to keep a page, and the bytes that are loaded whatever is kept."""
    gaps, always = [], 0
    for page, each in uses.of.items():
        for use, (position, _) in enumerate(each):
            distance, dead = uses.after(page, use)
            if not dead:
                gaps.append(_Gap(page, use, position, distance, uses.sizes[page], page in uses.stuck))
        # What was changed elsewhere has to be loaded; what comes into being doesn't.
        always += uses.sizes[page] * sum(
            bool(effect & Effect.RENEWED) and not effect & Effect.FRESH for _, effect in each
        )
    return gaps, always


def _epochs(uses: Uses, gaps: list[_Gap]) -> list[list[int]]:
    """For each use that makes a page dirty, the numbers of the gaps until it is made so again, or is spent."""
    number = {(gap.page, gap.use): index for index, gap in enumerate(gaps)}
    epochs = []
    for page, each in uses.of.items():
        for use, (_, effect) in enumerate(each):
            if not effect & Effect.WRITES or effect & Effect.SPENDS:
                continue
            epoch = []
            for step in range(len(each)):
                at = (use + step) % len(each)
                if step and each[at][1] & (Effect.WRITES | Effect.SPENDS):
                    break
                if (page, at) not in number:
                    break  # what follows doesn't need it
                epoch.append(number[page, at])
            if epoch:
                epochs.append(epoch)
    return epochs


def _least(gaps: list[_Gap], epochs: list[list[int]], room: npt.NDArray[np.int64]) -> float:
    """The least bytes: of gaps that aren't kept, which are loaded, and of epochs, which are written.

    Variables: the bytes kept over each gap; the sum of those kept over each access that doesn't use them, at most its
    ``room``; the bytes written in each epoch, at least those not kept of each of its gaps.
    """
    from scipy.optimize import linprog  # here, because training never needs it
    from scipy.sparse import coo_array

    counted = _tightest(room)
    length, num_gaps = len(counted), len(gaps)
    nbytes = np.array([gap.nbytes for gap in gaps], dtype=np.float64)
    starts = np.array([gap.start for gap in gaps])
    stops = starts + np.array([gap.length for gap in gaps])
    # Which of the accesses that count each gap spans: from the one to before the other, over two cycles.
    twice = np.concatenate((counted, counted + len(room)))
    starts, stops = np.searchsorted(twice, starts, "right"), np.searchsorted(twice, stops, "left")
    scale = float(nbytes.max())
    of_gap = np.arange(num_gaps)
    over = num_gaps + np.arange(length)
    # What is kept over an access was kept over the one before it, or used by it, and isn't used here.
    before = np.arange(length) - 1
    before[0] = length - 1
    rows = [np.arange(length), np.arange(length), starts % length, stops % length]
    columns = [over, num_gaps + before, of_gap, of_gap]
    values = [np.ones(length), -np.ones(length), -np.ones(num_gaps), np.ones(num_gaps)]
    # These equations say how it changes; what it is, is said once, for the first access.
    crossing = of_gap[(starts <= length) & (stops > length)]
    rows += [np.full(len(crossing) + 1, length)]
    columns += [np.concatenate((over[:1], crossing))]
    values += [np.concatenate((np.ones(1), -np.ones(len(crossing))))]
    width = num_gaps + length + len(epochs)
    equal = _matrix(coo_array, rows, columns, values, (length + 1, width))
    # kept + written >= size, for each gap of each epoch
    members = np.array([gap for epoch in epochs for gap in epoch], dtype=np.int64)
    owners = np.array([index for index, epoch in enumerate(epochs) for _ in epoch], dtype=np.int64)
    each = np.arange(len(members))
    minus = -np.ones(len(members))
    at_most = _matrix(
        coo_array, [each, each], [members, num_gaps + length + owners], [minus, minus], (len(each), width)
    )
    limits = -nbytes[members] / scale
    low = np.zeros(width)
    low[:num_gaps] = np.array([gap.stuck for gap in gaps]) * nbytes / scale
    high = np.concatenate((nbytes, room[counted], [nbytes[epoch[0]] for epoch in epochs])) / scale
    cost = np.concatenate((-np.ones(num_gaps), np.zeros(length), np.ones(len(epochs))))
    found = linprog(
        cost,
        A_ub=at_most if len(each) else None,
        b_ub=limits if len(each) else None,
        A_eq=equal,
        b_eq=np.zeros(length + 1),
        bounds=np.column_stack((low, high)),
        method="highs",
    )
    if found.status == 2:
        raise ValueError("what is stuck exceeds the capacity")
    # The solver computes in floating point, and isn't believed. Its prices prove the bound themselves: by weak duality
    # any prices of the equations, and any non-positive ones of the limits, give a value that no solution is below.
    prices = np.asarray(found.eqlin.marginals)
    reduced = cost - equal.T @ prices
    least = 0.0
    if len(each):
        dues = np.minimum(np.asarray(found.ineqlin.marginals), 0.0)
        reduced -= at_most.T @ dues
        least = float(limits @ dues)
    least += float(np.minimum(reduced * low, reduced * high).sum())
    return (least - 1e-9 * width) * scale + float(nbytes.sum())


def _tightest(room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The accesses that count: all, or of very many the tightest of each few. With fewer limits the least is lower, if
    anything, so the bound stays one."""
    every = -(-len(room) // MAX_COUNTED)
    firsts = np.arange(0, len(room), every)
    return np.array([first + int(room[first : first + every].argmin()) for first in firsts], dtype=np.int64)


def _matrix(kind: Any, rows: list[Any], columns: list[Any], values: list[Any], shape: tuple[int, int]) -> Any:
    """A sparse matrix; entries of the same place add up."""
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return kind(entries, shape=shape).tocsr()
