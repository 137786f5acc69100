"""Conversions between files: any source into a checkpoint of ours, without a model."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from tiermem.aio import open_queue
from tiermem.checkpoint.contents import BUFFERS, OPTIMIZER, PARAMETERS, path_of
from tiermem.checkpoint.document import Array, array_document, group_document, jsonable, write_document
from tiermem.checkpoint.folder import published
from tiermem.checkpoint.grid import Grid
from tiermem.checkpoint.inventory import CHUNK_NBYTES, FORMAT
from tiermem.checkpoint.source import RUN_NBYTES, Source, prove
from tiermem.checkpoint.writer import ChunkWriter
from tiermem.errors import SavingError


def convert(source: Source, path: Path, *, compression: str = "none", overwrite: bool = False) -> int:
    """Write everything of ``source`` into a checkpoint as ``TieredModule.save`` makes them; returns the tensors' bytes.

    In memory are five chunks of at most 16 MiB. Raises CheckpointError and SavingError.
    """
    arrays = {
        key: Array(
            entry.dtype,
            Grid.cut_to(entry.size, entry.order, max(1, CHUNK_NBYTES // entry.dtype.itemsize)),
            compression == "none",
        )
        for key, entry in source.entries.items()
    }
    documents = {
        "": {
            "tiermem": {"format": FORMAT},
            "step": source.attributes.get("step"),
            "extra": source.attributes.get("extra", {}),
            "tied": dict(source.tied),
        },
        PARAMETERS: {},
        BUFFERS: {},
    }
    if source.param_groups is not None:
        groups, state = jsonable(source.param_groups, "param_groups"), jsonable(source.scalars, "state")
        documents[OPTIMIZER] = {"param_groups": groups, "state": state}
    with ExitStack() as stack:
        folder = stack.enter_context(published(path, overwrite=overwrite))
        queue = stack.enter_context(open_queue())
        writer = ChunkWriter(queue, max((array.file_nbytes for array in arrays.values()), default=1))
        stack.callback(writer.close)
        try:
            for group in dict.fromkeys([*documents, *(key.group for key in arrays)]):
                write_document(folder / group, group_document(documents.get(group, {})))
            for key, array in arrays.items():
                write_document(folder / path_of(key), array_document(array, compression))
        except OSError as error:
            raise SavingError(error.errno or 0, error.strerror or str(error), os.fspath(folder)) from error
        for key, array in arrays.items():
            writer.begin(folder / path_of(key), array)
            step = max(1, RUN_NBYTES // array.dtype.itemsize)
            run = torch.empty(min(step, array.grid.numel), dtype=array.dtype)
            for start in range(0, array.grid.numel, step):
                piece = run[: min(step, array.grid.numel - start)].view(torch.uint8)
                source.read(key, start, piece)
                writer.put(start, piece)
        prove(source)
        writer.flush()
    return sum(array.nbytes for array in arrays.values())
