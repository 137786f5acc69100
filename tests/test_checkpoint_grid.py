"""How arrays are cut into chunks: every element in one chunk, every chunk one run, as Zarr has it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.aio import open_queue
from tiermem.checkpoint import crc
from tiermem.checkpoint.document import (
    Array,
    array_document,
    decode,
    encode,
    parse_array,
    read_document,
    write_document,
)
from tiermem.checkpoint.grid import Grid, alike, order_of, strides_in
from tiermem.checkpoint.reader import ArrayReader
from tiermem.checkpoint.writer import ChunkWriter, seal
from tiermem.errors import CheckpointError

shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = draw(shapes)
    return Grid.cut_to(shape, draw(st.permutations(range(len(shape)))), draw(st.integers(1, 40)))


@given(grids())
def test_chunks_are_runs_that_cover_every_element_once(grid: Grid) -> None:
    chunks = [grid[number] for number in range(grid.num_chunks)]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])][: len(chunks)]
    assert (chunks[-1].stop if chunks else 0) == grid.numel
    assert len({chunk.place for chunk in chunks}) == len(chunks)
    assert grid.contiguous
    for chunk in chunks:
        assert 0 < chunk.stop - chunk.start <= grid.chunk_numel
        for element in (chunk.start, chunk.stop - 1):
            assert grid[grid.number_at(element)] == chunk


@given(grids())
def test_a_chunk_holds_the_elements_that_zarr_puts_into_it(grid: Grid) -> None:
    numbers = torch.arange(grid.numel).reshape([grid.shape[axis] for axis in grid.order])
    logical = numbers.permute([grid.order.index(axis) for axis in range(len(grid.order))])
    for number in range(grid.num_chunks):
        chunk = grid[number]
        place = tuple(slice(i * k, (i + 1) * k) for i, k in zip(chunk.place, grid.chunk, strict=True))
        inside = logical[place] if place else logical
        assert sorted(inside.flatten().tolist()) == list(range(chunk.start, chunk.stop))


@given(grids(), st.data())
def test_only_the_chunks_of_a_span_are_named(grid: Grid, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, grid.numel))
    stop = data.draw(st.integers(start, grid.numel))
    all_chunks = [grid[number] for number in range(grid.num_chunks)]
    inside = [chunk for chunk in all_chunks if max(start, chunk.start) < min(stop, chunk.stop)]
    assert list(grid.covering(start, stop)) == inside


def test_the_last_chunk_is_nearly_full() -> None:
    grid = Grid.cut_to((1000, 64), (0, 1), 64 * 300)
    assert (grid.num_chunks, grid.chunk) == (4, (250, 64))
    assert Grid.cut_to((1001, 64), (0, 1), 64 * 300).chunk == (251, 64)
    assert Grid.cut_to((3, 4, 5), (2, 0, 1), 12).chunk == (3, 4, 1)


@given(shapes, st.data())
def test_the_order_of_axes_is_that_of_memory(shape: list[int], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    stride = strides_in(shape, order)
    found = order_of(shape, stride)
    assert found is not None
    if 0 not in shape:
        assert alike(shape, found, order)
        tensor = torch.arange(math.prod(shape)).as_strided(shape, stride)
        assert tensor.permute(found).reshape(-1).tolist() == list(range(math.prod(shape)))


def test_gaps_and_overlaps_have_no_order() -> None:
    assert order_of((2, 3), (6, 2)) is None
    assert order_of((2, 3), (0, 1)) is None
    assert order_of((1, 3), (99, 1)) == (0, 1)


@given(st.text(min_size=1, max_size=40).filter(lambda text: "\0" not in text))
def test_any_name_is_a_folder_and_comes_back(name: str) -> None:
    try:
        path = encode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return
    assert decode(path) == name
    assert "/" not in path
    assert not path.startswith("__")
    assert path.strip(".")
    assert path not in ("zarr.json", "c")


def test_what_no_torch_has_is_refused(tmp_path: Path) -> None:
    document = array_document(Array(torch.bfloat16, Grid.cut_to((3,), (0,), 9)))
    assert (document["data_type"], document["attributes"]) == ("uint16", {"dtype": "bfloat16"})
    assert parse_array(document, tmp_path).dtype is torch.bfloat16
    with pytest.raises(CheckpointError, match="'uint16' and the attribute dtype 'float32'"):
        parse_array({**document, "attributes": {"dtype": "float32"}}, tmp_path)
    for key in ("shape", "chunk_grid", "codecs", "chunk_key_encoding"):
        with pytest.raises(CheckpointError, match="not an array of Zarr"):
            parse_array({**document, key: None}, tmp_path)


# -- ranks: each writes and reads its own slice -------------------------------------------------------------


def slices(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Slices of equal size but the last, as a page is shared out."""
    size = -(-numel // ranks)
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


@pytest.mark.parametrize("chunk", [4096, 1 << 20])
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 1), (3, 2)])
def test_ranks_write_their_slices_and_others_read_theirs(
    writers: int, readers: int, chunk: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.checkpoint.writer.DIRECT_NBYTES", 0)
    array = Array(torch.float32, Grid.cut_to((250, 33), (0, 1), chunk // 4))
    values = torch.randn(250 * 33)
    write_document(disk / "a", array_document(array))
    told = []
    with open_queue() as queue:
        for start, stop in slices(array.grid.numel, writers):
            writer = ChunkWriter(queue, array.file_nbytes)
            writer.begin(disk / "a", array)
            for first in range(start, stop, 1000):  # as windows of a page come
                writer.put(first, values[first : min(first + 1000, stop)].view(torch.uint8))
            writer.flush()
            writer.close()
            told.append(json.loads(json.dumps(writer.parts)))
    seal(told, {str(disk / "a"): array})
    import zarr

    assert torch.equal(torch.from_numpy(zarr.open_array(str(disk / "a"), mode="r")[...]).flatten(), values)
    told = []
    for start, stop in slices(array.grid.numel, readers):
        reader = ArrayReader(disk / "a", array, "a")
        mine = torch.empty(stop - start)
        reader.read(start, mine.view(torch.uint8))
        assert torch.equal(mine, values[start:stop])
        reader.close()
        own = (stop - start) * 4
        assert own <= reader.nbytes <= own * 1.04, "a rank reads its own slice, and checksums of whole chunks"
        told.append(reader.spans)
    for (_, number), spans in crc.by_chunk(told).items():
        reader = ArrayReader(disk / "a", array)
        reader.prove(number, spans)
        assert reader.nbytes <= 8 * 33, (
            "what ranks have read together isn't read again: only what fills it up"
        )
        with pytest.raises(CheckpointError, match=r"is damaged: its bytes 0 to .* have checksum"):
            reader.prove(number, [spans[0]._replace(checksum=spans[0].checksum ^ 1), *spans[1:]])
        reader.close()


def test_a_part_of_a_chunk_is_not_compressed(disk: Path) -> None:
    array = Array(torch.float32, Grid.cut_to((100,), (0,), 100), raw=False)
    write_document(disk / "a", array_document(array, "zstd"))
    with open_queue() as queue:
        writer = ChunkWriter(queue, array.file_nbytes)
        writer.begin(disk / "a", array)
        writer.put(0, torch.zeros(50).view(torch.uint8))
        with pytest.raises(CheckpointError, match="elements 0 to 50 are a part of chunk"):
            writer.flush()
        writer.close()


def test_arrays_of_others_are_read(tmp_path: Path) -> None:
    import numpy as np
    import zarr

    values = np.arange(7 * 11, dtype="f4").reshape(7, 11)
    for number, (chunks, settings) in enumerate(
        itertools.product(
            [(3, 4), (7, 11), (9, 20), (2, 11)],
            [
                {"compressors": None},
                {},
                {"shards": "auto"},
                {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
            ],
        )
    ):
        if settings.get("shards"):
            settings = {"shards": tuple(2 * n for n in chunks)}
        made = zarr.create_array(
            str(tmp_path / str(number)), shape=values.shape, chunks=chunks, dtype="f4", **settings
        )
        made[...] = values
        array = parse_array(read_document(tmp_path / str(number)), tmp_path / str(number))
        reader = ArrayReader(tmp_path / str(number), array)
        out = torch.empty(40)
        reader.read(30, out.view(torch.uint8))
        assert out.tolist() == values.flatten()[30:70].tolist(), (chunks, settings)
        reader.close()
