"""Descriptions of pages: for the head of a trace, and for those who find the page files of a run that is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tiermem.page import Page
from tiermem.trace import PageInfo
from tiermem.unit import Group, Unit


def pages_of(units: Iterable[Unit]) -> Iterator[tuple[Group, Page]]:
    """All pages, each with its group."""
    for unit in units:
        for group in unit.groups:
            pages = [group.parameter, *([group.gradient] if group.gradient else [])]
            pages += [page.shard for page in pages if page.shard is not None]
            for page in pages + group.state_pages:
                yield group, page


def infos(units: Iterable[Unit]) -> Iterator[PageInfo]:
    """What a trace says of each page."""
    for group, page in pages_of(units):
        yield PageInfo(
            page.number,
            page.unit,
            page.kind.name.lower(),
            str(page.dtype).removeprefix("torch."),
            page.nbytes,
            tuple(field.name for field in group.fields),
        )


def facts(page: Page, group: Group) -> dict[str, Any]:
    """What a page is, in JSON: kind and dtype, and the tensors in it with their first elements, sizes and strides."""
    starts = {page.number: part.start for part in group.parts for page in part.pages}
    starts |= {each.page.number: each.start for stretches in group.states.values() for each in stretches}
    start = starts.get(page.number, 0)
    return {
        "kind": page.kind.name.lower(),
        "dtype": str(page.dtype).removeprefix("torch."),
        "blank": page.blank,
        "tensors": [
            {"name": f.name, "first": f.offset - start, "size": f.size, "stride": f.stride}
            for f in group.fields
        ],
    }
