"""Formats: which reader a path is for."""

from __future__ import annotations

from pathlib import Path

from tiermem.checkpoint import distributed, pickles
from tiermem.checkpoint.deepspeed import DeepSpeedSource, is_deepspeed
from tiermem.checkpoint.document import DOCUMENT
from tiermem.checkpoint.safetensors import SafetensorsSource
from tiermem.checkpoint.source import Source, ZarrSource
from tiermem.errors import CheckpointError

KNOWN = (
    "a folder of model.save(); safetensors, a file or a Hugging Face folder; a file of torch.save() (.pt, .pth, .bin) "
    "or a folder with pytorch_model.bin; a folder of torch.distributed.checkpoint; a folder of DeepSpeed's ZeRO-3"
)


def open_source(path: Path) -> Source:
    """The tensors at ``path``, in whichever of the known formats they are; closed by the caller.

    Raises CheckpointError when there is nothing, or nothing that is known, or it is damaged.
    """
    path = path.expanduser()
    if not path.exists():
        raise CheckpointError(f"{path}: there is nothing")
    if path.is_file():
        return SafetensorsSource(path) if path.suffix == ".safetensors" else pickles.TorchSource(path)
    if (path / DOCUMENT).is_file():
        return ZarrSource(path)
    if any(path.glob("*.safetensors")):
        return SafetensorsSource(path)
    if (path / distributed.METADATA).is_file():
        return distributed.DistributedSource(path)
    if (path / pickles.INDEX).is_file() or (path / pickles.SINGLE).is_file():
        return pickles.TorchSource(path)
    if is_deepspeed(path):
        return DeepSpeedSource(path)
    raise CheckpointError(f"{path}: is of no format that is known here: {KNOWN}")
