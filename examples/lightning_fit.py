"""A LightningModule is trained paged: one argument of its Trainer.

Needs: pip install "tiermem[lightning]". Run: python examples/lightning_fit.py
"""

import logging
import sysconfig
import tempfile
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tiermem.integrations.lightning import PagedStrategy
from tiermem.trainer import AdamW
from tiermem.trainer.data import Corpus
from tiermem.trainer.gpt import GPT, GPTShape


class Module(pl.LightningModule):
    """A small GPT and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(GPTShape(sequence=64, layers=4, width=128, heads=4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss of one batch."""
        loss: Tensor = self.net(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """One of tiermem's."""
        return AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, and print the losses."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of few workers
    pl.seed_everything(0, verbose=False)
    module = Module()
    batches = Corpus(Path(sysconfig.get_path("stdlib")) / "argparse.py").batches(batch=4, sequence=64)
    with tempfile.TemporaryDirectory(dir=".", prefix=".lightning-") as folder:
        policy = {"device": {"kind": "cpu"}, "host": {"budget": "4MiB"}, "disk": {"paths": [folder]}}
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", strategy=PagedStrategy(policy), gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(list(islice(batches, 12)), batch_size=None))
    print(f"loss {module.losses[0]:.3f} at first, {module.losses[-1]:.3f} nats/byte at last")
    kinds = {type(parameter) for parameter in module.parameters()}
    print(f"an ordinary module again: {kinds == {torch.nn.Parameter}}")


if __name__ == "__main__":
    main()
