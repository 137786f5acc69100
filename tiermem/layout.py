"""The layout of a run: which tensors lie where in which page. A commit can be resumed by a run with the same one only.

It is plain data, for JSON: the names of the units, and for each group of tensors their places in its pages. Pages that
come into being in a run, for the state of an optimizer that isn't ours, come behind those that wrapping has made, and
are no part of what is compared: a commit from before they were there knows nothing of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

Layout = dict[str, Any]

LATER = "later"
"""The key of the pages that wrapping has not made."""


def fingerprint(layout: Layout) -> bytes:
    """16 bytes that differ where two layouts do."""
    return hashlib.blake2b(json.dumps(_first(layout), sort_keys=True).encode(), digest_size=16).digest()


def pages_of(layout: Layout) -> list[list[Any]]:
    """All pages, by number: unit, kind, dtype and bytes of each."""
    return [*layout["pages"], *layout.get(LATER, ())]


def _first(layout: Layout) -> Layout:
    return {key: value for key, value in layout.items() if key != LATER}


def differences(model: Layout, committed: Layout, *, tensors_only: bool = False) -> list[str]:
    """In words, all in which a model differs from what was committed; empty when they are the same.

    ``tensors_only``: of ``model``, only names, sizes, dtypes and which are trained are known yet.
    """
    found = []
    ours = {each["name"]: each for each in model["tensors"]}
    theirs = {each["name"]: each for each in committed["tensors"]}
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if name not in ours:
            found.append(f"{name} {theirs[name]['size']} was committed, and the model doesn't have it")
        elif name not in theirs:
            found.append(f"{name} {ours[name]['size']} is in the model, and wasn't committed")
        else:
            for what in ("size", "dtype", "trainable"):
                a, b = theirs[name][what], ours[name][what]
                if a != b:
                    found.append(f"{name} has {what} {b}, and {a} was committed")
    if tensors_only:
        return found
    if not found and model["units"] != committed["units"]:
        found.append(f"its units are {model['units']}, and those committed {committed['units']}")
    if not found and _first(model) != _first(committed):
        found.append("the same tensors lie in other places of their pages")
    return found


def page_name(layout: Layout, number: int) -> str:
    """A page in words: its kind, its unit's number and name, its own number."""
    unit, kind, _, nbytes = pages_of(layout)[number]
    return f"the {kind} page of unit {unit}, {layout['units'][unit]} (page {number}, {nbytes} bytes)"


def held(layout: Layout, numbers: Sequence[int]) -> str:
    """What the pages with these numbers are, in words: bytes by kind, and of which units."""
    kinds: dict[str, int] = {}
    units: dict[str, None] = {}
    pages = pages_of(layout)
    for number in numbers:
        unit, kind, _, nbytes = pages[number]
        kinds[kind] = kinds.get(kind, 0) + nbytes
        units[layout["units"][unit]] = None
    bytes_of = ", ".join(f"{nbytes:,} bytes of {kind}s" for kind, nbytes in kinds.items())
    names = list(units)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{bytes_of} (of {', '.join(names[:6])}{more})" if kinds else "no page that was committed"
