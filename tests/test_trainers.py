"""Other people's training loops, over a paged model and over the one that isn't: the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tiermem
from tests.parity import adamw, assert_same, refused, same
from tests.zoo import FAMILIES
from tiermem.trainer import AdamW


def compatible(what: str, result: str = "equal") -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("Trainers", what, "", result)


def net() -> Any:
    """A Llama with nothing random in it."""
    return FAMILIES["Llama"].build()


def rows(count: int = 12) -> list[dict[str, Tensor]]:
    """The data: one sequence each."""
    torch.manual_seed(3)
    ids = torch.randint(3, 96, (count, 10))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def policy(disk: Path) -> dict[str, Any]:
    """The smallest budget that works."""
    config: dict[str, Any] = {"device": {"kind": "cpu"}, "disk": {"paths": [str(disk)]}, "host": {}}
    return {**config, "host": {"budget": refused(net(), config, "host", False)}}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """accelerate keeps what the first Accelerator of a process was given."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


# -- the Trainer of transformers -----------------------------------------------------------------------------


def trainer_of(folder: Path, model: Any, paged: dict[str, Any] | None = None, **arguments: Any) -> Any:
    import transformers

    from tiermem.integrations.transformers import PagedTrainer

    class Plain(transformers.Trainer):
        """Without paging, by the same optimizer."""

        get_optimizer_cls_and_kwargs = staticmethod(PagedTrainer.get_optimizer_cls_and_kwargs)

    given = {
        "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "max_grad_norm": 0.5, "weight_decay": 0.1, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "learning_rate": 1e-2, **arguments,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **given)
    data = rows()
    keys = {"args": args, "model": model, "train_dataset": data, "eval_dataset": data[:4]}
    return Plain(**keys) if paged is None else PagedTrainer(**keys, policy=paged)


def logs_of(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [
        {name: value for name, value in log.items() if not name.endswith(("runtime", "per_second", "flos"))}
        for log in trainer.state.log_history
    ]


@compatible("transformers.Trainer: PagedTrainer")
@pytest.mark.parametrize(
    "arguments", [{}, {"bf16": True, "activation_checkpointing": True}], ids=["", "bf16"]
)
def test_trainer_of_transformers(arguments: dict[str, Any], disk: Path, tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "plain", net(), **arguments)
    plain.train()
    plain.evaluate()
    with trainer_of(tmp_path / "paged", net(), policy(disk), **arguments) as paged:
        paged.evaluate()
        paged.train()
        paged.evaluate()
        assert paged._paged.stats()["nbytes_read_from_disk"] > 0
        assert_same("state", plain.model.state_dict(), dict(paged.model.state_dict()))
        assert_same("optimizer", plain.optimizer.state_dict()["state"], paged.optimizer.state_dict()["state"])
        assert logs_of(plain) == logs_of(paged)
        paged.save_model(tmp_path / "saved")
    assert not list(disk.iterdir())
    assert_same("given back", plain.model.state_dict(), paged.model.state_dict())
    again = type(paged.model).from_pretrained(tmp_path / "saved")
    assert_same("saved", plain.model.state_dict(), again.state_dict())


@compatible("transformers.Trainer: resumed from a checkpoint")
def test_trainer_resumes(disk: Path, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", net())
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 2}
    with trainer_of(tmp_path / "paged", net(), policy(disk), **saving) as first:
        first.train()
    with trainer_of(tmp_path / "paged", net(), policy(disk), **saving) as second:
        second.train(resume_from_checkpoint=str(tmp_path / "paged" / "checkpoint-2"))
        assert_same("state", whole.model.state_dict(), dict(second.model.state_dict()))


def test_trainer_with_what_cannot_update_pages(disk: Path, tmp_path: Path) -> None:
    with pytest.raises(tiermem.ConfigError, match="adafactor"):
        trainer_of(tmp_path, net(), policy(disk), optim="adafactor").train()
    trainer = trainer_of(tmp_path, net(), policy(disk))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-2)
    with pytest.raises(tiermem.ConfigError, match="SGD"):
        trainer.train()
    assert not list(disk.iterdir())


# -- accelerate ----------------------------------------------------------------------------------------------


@compatible("accelerate: PagedAccelerator")
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_accelerate(mixed: str, disk: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from tiermem.integrations.accelerate import PagedAccelerator

    ends = []
    for paged in (False, True):
        settings = {"cpu": True, "gradient_accumulation_steps": 2, "mixed_precision": mixed}
        accelerator = PagedAccelerator(policy=policy(disk), **settings) if paged else Accelerator(**settings)
        given = net()
        torch.manual_seed(1)
        model, optimizer, loader = accelerator.prepare(given, adamw(given), DataLoader(rows(), batch_size=2))
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).clone())
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(accelerator.unwrap_model(model), type(given))
        folder = tmp_path / str(paged)
        accelerator.save_state(folder)
        with torch.no_grad():
            for parameter in accelerator.unwrap_model(model).parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        ends.append({"losses": torch.stack(losses), **accelerator.get_state_dict(model)})
        accelerator.end_training()
    assert_same("ends", *ends)
    assert not list(disk.iterdir())
    assert_same("given back", ends[0], {"losses": ends[1]["losses"], **given.state_dict()})


# -- Lightning -----------------------------------------------------------------------------------------------


@compatible("PyTorch Lightning: PagedStrategy")
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_lightning(clip: str, disk: Path, tmp_path: Path) -> None:
    import pytorch_lightning as pl

    from tiermem.integrations.lightning import PagedStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.losses.append(self.net(**batch).loss.detach())

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=1e-2)

    ends, saved = [], []
    for paged in (False, True):
        folder = tmp_path / str(paged)
        config = policy(disk)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few workers, few steps
            trainer = pl.Trainer(
                max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, gradient_clip_algorithm=clip,
                enable_progress_bar=False, enable_model_summary=False, logger=False, default_root_dir=folder,
                accelerator="cpu", strategy=PagedStrategy(config) if paged else "auto",
            )  # fmt: skip
            module = Module()
            loader = DataLoader(rows(8), batch_size=2)
            trainer.fit(module, loader, loader)
        ends.append({"losses": torch.stack(module.losses), **module.state_dict()})
        (path,) = folder.rglob("*.ckpt")
        saved.append(torch.load(path, weights_only=False))
    assert_same("ends", *ends)
    assert_same("saved", saved[0]["state_dict"], saved[1]["state_dict"])
    assert_same("moments", *(each["optimizer_states"][0]["state"] for each in saved))
    assert not list(disk.iterdir())
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    tokens = rows(1)[0]["input_ids"][None]
    assert same(module.net(tokens).logits, module.net(tokens).logits)


def test_lightning_gives_the_module_back_after_an_error(disk: Path) -> None:
    import pytorch_lightning as pl

    from tiermem.integrations.lightning import PagedStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            raise ValueError("boom")

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters())

    module = Module()
    trainer = pl.Trainer(
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
        accelerator="cpu", strategy=PagedStrategy(policy(disk)), max_steps=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(module, DataLoader(rows(2), batch_size=2))
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert not list(disk.iterdir())
