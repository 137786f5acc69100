"""PEFT: adapters that train on a frozen base, whose pages are only read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import Case
from tests.parity import Outcome, adamw, assert_equal, assert_same, same, train
from tests.zoo import FAMILIES
from tiermem.page import Kind
from tiermem.trace import Event
from tiermem.trace.reader import TraceFile
from tiermem.unit import Group

TIERS = pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])


def compatible(what: str, result: str = "equal") -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("PEFT", what, "", result)


def adapted(name: str, **settings: Any) -> Any:
    """A family's model in bfloat16 with LoRA adapters in float32, as they are usually trained."""
    import peft

    net = FAMILIES[name].build().to(torch.bfloat16)
    torch.manual_seed(7)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings})
    model = peft.get_peft_model(net, config)  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)  # the second factor begins at zero, which hides mistakes
    return model.train()


def case_of(name: str, **settings: Any) -> Case:
    """Its training."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = model(**batch).loss
        return result

    return Case(name, lambda: adapted(name, **settings), FAMILIES[name].batch, loss)  # type: ignore[arg-type]


def run(case: Case, wrap: Wrap | None = None, three: bool = False, **sections: Any) -> Outcome:
    """Train it, wrapped in the smallest budget if ``wrap`` is given."""
    net = case.build()
    model = net if wrap is None else wrap(net, host="smallest", device="smallest", three=three, **sections)
    return train(model, adamw(model), case, steps=3)


def groups_of(model: tiermem.TieredModule, trainable: bool) -> list[Group]:
    """The groups of pages that train, or don't."""
    return [g for unit in model._runtime.units for g in unit.groups if g.trainable == trainable]


@compatible("LoRA on a frozen base in bfloat16, adapters in float32")
@TIERS
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_lora(name: str, three: bool, wrap: Wrap) -> None:
    case = case_of(name)
    assert_equal(run(case), run(case, wrap, three))


@compatible("with gradient checkpointing, dropout, biases, DoRA")
@pytest.mark.parametrize(
    "settings",
    [{"lora_dropout": 0.2}, {"bias": "all"}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}],
    ids=lambda settings: next(iter(settings)),
)
def test_ways_to_adapt(settings: dict[str, Any], wrap: Wrap) -> None:
    def build() -> Any:
        model = adapted("Llama", **settings)
        if "lora_dropout" in settings:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()  # type: ignore[operator]
        return model

    case = case_of("Llama")._replace(build=build)
    # DoRA's own modules read the base's weights: two units at a time, which no smallest budget knows of.
    host = 0.6 if "use_dora" in settings else "smallest"
    assert_equal(run(case), train(model := wrap(build(), host=host), adamw(model), case, steps=3))


@compatible("pages of the base are never written again, and have neither gradients nor optimizer state")
@TIERS
def test_pages_of_a_frozen_base_are_only_read(three: bool, wrap: Wrap, disk: Path) -> None:
    case, file = case_of("Llama"), disk / "run.trace"
    model = wrap(case.build(), host="smallest", device="smallest", three=three, trace={"file": str(file)})
    base, adapters = groups_of(model, False), groups_of(model, True)
    frozen = {group.parameter.number for group in base}
    assert not any(group.gradient or group.parts for group in base)
    trained = {page.number for page in model._runtime.table if page.kind is not Kind.PARAMETER}
    owned = {
        p.number for g in adapters for p in (g.gradient, *(p for part in g.parts for p in part.pages)) if p
    }
    assert trained == owned
    model._runtime.pager.transfers.drain()
    with TraceFile(file) as before:
        adopted = len(before.records)
    train(model, adamw(model), case, steps=3)
    model.close(restore=False)
    with TraceFile(file) as trace:
        records = trace.records[adopted:]
        written = {int(record["page"]) for record in records if record["event"] == Event.WRITEBACK}
        read = {int(record["page"]) for record in records if record["event"] == Event.LANDED}
    assert frozen & read, "nothing of the base was paged: the test shows nothing"
    assert not frozen & written
    assert written - frozen, "no adapter was written back, either"


@compatible("merge and unload")
@TIERS
def test_adapters_are_merged_and_unloaded(three: bool, wrap: Wrap) -> None:
    case, ends, answers = case_of("Llama"), [], []
    batch = {name: value for name, value in case.batch().items() if name != "labels"}  # type: ignore[attr-defined]
    for paged in (False, True):
        net = case.build()
        model: Any = wrap(net, host="smallest", device="smallest", three=three) if paged else net
        train(model, adamw(model), case, steps=2)
        model.eval()
        answers.append({})
        with torch.no_grad():
            answers[-1]["adapted"] = model(**batch).logits
            model.merge_adapter()
            answers[-1]["merged"] = model(**batch).logits
            model.unmerge_adapter()
            answers[-1]["unmerged"] = model(**batch).logits
            with model.disable_adapter():
                answers[-1]["base"] = model(**batch).logits
            merged = model.merge_and_unload()
            answers[-1]["unloaded"] = merged(**batch).logits
        ends.append(dict(merged.state_dict()))
        if paged:
            model._runtime.check()
    assert_same("answers", *answers)
    assert_same("state", *ends)


@compatible("adapters saved and loaded alone")
def test_adapters_are_saved_alone(wrap: Wrap, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    case, files = case_of("Llama"), []
    for paged in (False, True):
        net = case.build()
        model: Any = wrap(net, host="smallest") if paged else net
        train(model, adamw(model), case, steps=1)
        folder = tmp_path / str(paged)
        model.save_pretrained(folder)
        assert not list(folder.glob("model*"))
        files.append(load_file(folder / "adapter_model.safetensors"))
    assert files[0]
    assert all("lora" in name for name in files[0])
    assert_same("adapter", *files)
    fresh: Any = wrap(case.build(), host="smallest", three=True)
    fresh.load_adapter(tmp_path / "True", "default", is_trainable=True)
    batch = case.batch()
    with torch.no_grad():
        assert same(fresh(**batch).loss, model(**batch).loss)  # type: ignore[arg-type]


@compatible("an adapter that joins a model while it is paged", "refused")
def test_an_adapter_that_joins_later_is_refused_by_name(wrap: Wrap) -> None:
    import peft

    model: Any = wrap(FAMILIES["Llama"].build(), host="smallest")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(tiermem.PagingError, match=r"layers\.0\.self_attn\.q_proj\..*lora_A.*close"):
        peft.get_peft_model(model.module, config)
