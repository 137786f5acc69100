"""Damage in checkpoints: whatever bit of an array flips, loading says where, and never goes on with other numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tiermem
from tests.checkpoint_ranks import load_damaged
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_same, build, snapshot, train
from tests.ranks import started
from tiermem.checkpoint import crc
from tiermem.checkpoint.document import CHECKSUM, DOCUMENT, parse_array, read_document
from tiermem.checkpoint.reader import ArrayReader
from tiermem.cli import app

CASE = BY_NAME["odd-mlp"]


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(0, 100_000))
def test_checksums_of_parts_come_to_that_of_the_whole(parts: list[bytes], num_zeros: int) -> None:
    whole = b"".join(parts)
    checksum, at, spans = 0, 0, []
    for part in parts:
        own = google_crc32c.value(part)
        checksum = crc.joined(checksum, own, len(part))
        spans.append(crc.Span("a", 0, at, at + len(part), own))
        at += len(part)
    assert checksum == google_crc32c.value(whole)
    assert crc.extended_by_zeros(checksum, num_zeros) == google_crc32c.value(whole + bytes(num_zeros))
    spans = [span for span in spans if span.start < span.stop]
    random.Random(0).shuffle(spans)
    assert crc.of_spans([*spans, *spans], at) == checksum
    if spans:
        assert crc.of_spans(spans[1:], at) is None
        assert crc.of_spans(spans, at + 1) is None


def saved(path: Path, wrap: Wrap, **options: Any) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """A checkpoint with an optimizer's state, and what is in it."""
    model = wrap(build(CASE), host="1GiB")
    optimizer = adamw(model)
    train(model, optimizer, CASE, steps=1)
    model.save(path, optimizer, chunk_nbytes=32768, **options)
    found = {name: value.clone() for name, value in model.state_dict().items()}, snapshot(optimizer)
    model.close(restore=False)
    return found


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_one_bit_anywhere(compression: str, wrap: Wrap, disk: Path) -> None:
    state, moments = saved(disk / "ck", wrap, compression=compression)
    model = wrap(build(CASE, seed=3), host="1GiB")
    optimizer = adamw(model)
    files = sorted(file for file in (disk / "ck").rglob("*") if file.is_file())
    chunks = [file for file in files if file.name != DOCUMENT]
    draw = random.Random(0)
    # One bit each of many chunks, the first and the last of some; of documents many, as most of theirs are no numbers.
    flips = [(file, draw.randrange(file.stat().st_size * 8)) for file in draw.sample(chunks, 15)]
    flips += [(file, bit) for file in chunks[::7] for bit in (0, file.stat().st_size * 8 - 1)][:12]
    num_chunks = len(flips)
    documents = [file for file in files if file.name == DOCUMENT]
    flips += [(file, draw.randrange(file.stat().st_size * 8)) for file in draw.sample(documents, 12)]
    told = 0
    for file, bit in flips:
        flip(file, bit)
        text = None
        try:
            model.load(disk / "ck", optimizer)
        except tiermem.CheckpointError as error:
            text = str(error)
        if text is None:
            assert file.name == DOCUMENT, f"bit {bit} of {file} was not noticed"
            assert_same(f"bit {bit} of {file}", state, dict(model.state_dict()))
            assert_same(f"bit {bit} of {file}", moments, snapshot(optimizer))
        else:
            told += 1
            assert file.name == DOCUMENT or str(file) in text, (bit, text)
        flip(file, bit)
    assert told > num_chunks
    model.load(disk / "ck", optimizer)
    assert_same("state", state, dict(model.state_dict()))
    assert_same("optimizer", moments, snapshot(optimizer))


def test_a_number_in_a_document_can_not_change(wrap: Wrap, disk: Path) -> None:
    saved(disk / "ck", wrap)
    model = wrap(build(CASE), host="1GiB")
    document = disk / "ck/optimizer" / DOCUMENT
    document.write_text(document.read_text().replace('"lr": 0.003', '"lr": 0.004'))
    with pytest.raises(tiermem.CheckpointError, match=r"optimizer/zarr\.json is damaged, or was edited"):
        model.load(disk / "ck", adamw(model))


def test_what_is_exported_or_copied_is_compared(wrap: Wrap, disk: Path) -> None:
    saved(disk / "ck", wrap)
    file = next((disk / "ck/parameters").glob("*.weight/c.*"))
    flip(file, 999)
    for words in (["export"], ["import"]):
        result = CliRunner().invoke(app, ["checkpoint", *words, str(disk / "ck"), str(disk / "out")])
        assert result.exit_code != 0
        assert str(file) in result.output.replace("\n", "")
        assert sorted(each.name for each in disk.iterdir() if "ck" in each.name or "out" in each.name) == [
            "ck"
        ]


def test_verify_finds_it_all(wrap: Wrap, disk: Path) -> None:
    saved(disk / "series/step-1", wrap)
    saved(disk / "series/step-2", wrap, compression="zstd")
    whole = CliRunner().invoke(app, ["verify", str(disk / "series")])
    assert whole.exit_code == 0
    assert whole.stdout.count(": whole") == 2
    damaged = [sorted((disk / f"series/step-{n}").rglob("c.*"))[n] for n in (1, 1, 2)]
    damaged[0] = sorted((disk / "series/step-1").rglob("c.*"))[-1]
    for file in damaged:
        flip(file, 77)
    lost = sorted((disk / "series/step-2").rglob("c.*"))[-1]
    lost.unlink()
    result = CliRunner().invoke(app, ["verify", str(disk / "series"), "--json"])
    assert result.exit_code == 1
    one, two = json.loads(result.stdout)
    assert (one["damaged"], len(one["problems"]), two["damaged"], len(two["problems"])) == (True, 2, True, 2)
    text = " ".join(one["problems"] + two["problems"])
    assert all(str(file) in text for file in damaged)
    assert f"{lost} is missing" in text
    document = disk / "series/step-1/parameters" / DOCUMENT
    document.write_text(
        document.read_text().replace("{}", '{"a": 1}').replace('"zarr_format": 3', '"zarr_format": 2')
    )
    result = CliRunner().invoke(app, ["verify", str(disk / "series/step-1")])
    assert result.exit_code == 1
    empty = CliRunner().invoke(app, ["verify", str(disk / "series/step-2/optimizer")])
    assert empty.exit_code != 0
    assert "there is no durable run and no checkpoint" in empty.output.replace("\n", " ")


def without_checksums(path: Path) -> None:
    """Make a checkpoint what tiermem wrote before it had checksums in them."""
    for document in path.rglob(DOCUMENT):
        known = json.loads(document.read_text())
        del known["attributes"][CHECKSUM]
        if known["node_type"] == "array":
            assert known["codecs"].pop() == {"name": "crc32c"}
            for chunk in document.parent.glob("c*"):
                chunk.write_bytes(chunk.read_bytes()[: -crc.NBYTES])
        document.write_text(json.dumps(known))


def test_checkpoints_from_before_there_were_checksums(wrap: Wrap, disk: Path) -> None:
    state, moments = saved(disk / "ck", wrap)
    without_checksums(disk / "ck")
    model = wrap(build(CASE, seed=3), host="smallest")
    optimizer = adamw(model)
    model.load(disk / "ck", optimizer)
    assert_same("state", state, dict(model.state_dict()))
    assert_same("optimizer", moments, snapshot(optimizer))
    result = CliRunner().invoke(app, ["verify", str(disk / "ck")])
    assert result.exit_code == 0
    assert "arrays have no checksums" in result.stdout
    assert model.save(disk / "next").nbytes_linked == 0, "files without checksums are not taken over"


def test_parts_read_in_any_order_are_proved(wrap: Wrap, disk: Path) -> None:
    saved(disk / "ck", wrap)
    folder = max(
        (each for each in (disk / "ck/parameters").iterdir() if each.is_dir()),
        key=lambda each: sum(f.stat().st_size for f in each.iterdir()),
    )
    array = parse_array(read_document(folder), folder)
    draw = random.Random(0)

    def noticed() -> bool:
        reader = ArrayReader(folder, array, "it")
        try:
            for _ in range(draw.randrange(1, 4)):
                start = draw.randrange(array.grid[0].stop)
                stop = draw.randrange(start + 1, array.grid[0].stop + 1)
                reader.read(start, torch.empty((stop - start) * array.dtype.itemsize, dtype=torch.uint8))
            reader.close()
            for (_, number), spans in crc.by_chunk([reader.spans]).items():
                reader.prove(number, spans)
        except tiermem.CheckpointError:
            return True
        finally:
            reader.close()
        return False

    assert not any(noticed() for _ in range(30))
    flip(folder / array.name_of(array.grid[0]), 4000)
    assert all(noticed() for _ in range(30))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_read_parts_of_chunks_notice(world: int, disk: Path) -> None:
    with started(world, load_damaged, str(disk / "ck")) as ranks:
        results = ranks.join()
    texts = [text for result in results for text in result]
    assert len(texts) == world * 3, f"{results}\n{ranks.log()}"
    assert all("is damaged: its bytes" in text or "could not do its part" in text for text in texts), texts
    assert any("is damaged: its bytes" in text for text in texts)
