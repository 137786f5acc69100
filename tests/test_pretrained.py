"""Folders of safetensors files, streamed into pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiermem
from tests.models import BY_NAME, GPT, ConvNet, Views
from tests.parity import adamw, assert_equal, assert_same, build, train
from tests.test_weights import save, save_folder
from tiermem.weights import SINGLE, WeightsError

CASE = BY_NAME["gpt-tied"]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests are small."""
    monkeypatch.setattr("tiermem.deferral.SMALL", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The weights of a tied GPT in three files, the tied one named once."""
    state = build(CASE, seed=3).state_dict()
    del state["head.weight"]
    save_folder(tmp_path, state, 3)
    return tmp_path


def policy(disk: Path, **sections: Any) -> dict[str, Any]:
    """A budget of a quarter of the parameters, gradients and state of the case's model."""
    budget = sum(p.nbytes for p in build(CASE).parameters())
    return {"host": {"budget": budget}, "disk": {"paths": [str(disk)]}, **sections}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_it_trains_as_the_model_that_loaded_them(dtype: str | None, folder: Path, disk: Path) -> None:
    sections = {"precision": {"parameters": dtype}} if dtype else {}
    plain = tiermem.TieredModule(build(CASE, seed=3), policy(disk, **sections))
    state = torch.get_rng_state()
    model = tiermem.from_pretrained(folder, policy(disk, **sections), build=CASE.build)
    with plain, model:
        assert torch.equal(torch.get_rng_state(), state)  # its initialisers have not run
        assert model.head.weight is model.wte.weight
        assert_equal(*(train(each, adamw(each), CASE) for each in (plain, model)))
        plain.close(restore=False)
        model.close(restore=False)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [Views, ConvNet, lambda: ConvNet().to(memory_format=torch.channels_last)])
def test_other_dtypes_strides_and_buffers(make: Any, stored: torch.dtype, tmp_path: Path, disk: Path) -> None:
    torch.manual_seed(3)
    state = {n: t.to(stored) if t.is_floating_point() else t for n, t in make().state_dict().items()}
    save(tmp_path / SINGLE, {**state, "left.alone": torch.ones(3)})
    plain = make()
    plain.load_state_dict(state)
    with tiermem.from_pretrained(tmp_path, policy(disk), build=make) as model:
        assert_same("state", plain.state_dict(), model.state_dict())
        assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()]


class Inner(GPT):
    """As transformers has it: the head's model holds the base model under this name."""

    base_model_prefix = "net"


class Outer(nn.Module):
    base_model_prefix = "net"

    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()


def test_the_prefix_of_the_base_model_comes_and_goes(tmp_path: Path, disk: Path) -> None:
    inner = {name: torch.randn_like(value) for name, value in GPT().state_dict().items()}
    outer = {f"net.{name}": value for name, value in inner.items()}
    for number, (saved, make, expected) in enumerate([(inner, Outer, outer), (outer, Inner, inner)]):
        save(tmp_path / f"{number}.safetensors", saved)
        with tiermem.from_pretrained(tmp_path / f"{number}.safetensors", policy(disk), build=make) as model:
            assert_same("state", expected, model.state_dict())


def test_what_is_missing_is_refused_or_keeps_its_initial_values(folder: Path, disk: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"no weights for 1 tensors of the module, among them \['head.weight'\]"
    ):
        tiermem.from_pretrained(folder, policy(disk), build=GPT)
    config = policy(disk)
    expected = build(CASE, seed=3).state_dict() | {"head.weight": build(BY_NAME["gpt"]).head.weight.detach()}
    torch.manual_seed(0)
    with tiermem.from_pretrained(folder, config, build=GPT, strict=False) as model:
        assert_same("state", expected, model.state_dict())
    with pytest.raises(
        WeightsError, match=r"wte.weight has shape \[67, 48\], and the module's wte.weight \[67, 32\]"
    ):
        tiermem.from_pretrained(folder, policy(disk), build=lambda: GPT(dim=32))
    assert list(disk.iterdir()) == []


def test_a_folder_that_does_not_say_which_model(folder: Path, disk: Path) -> None:
    with pytest.raises(tiermem.ConfigError, match=r"config.json: does not say which model .* build="):
        tiermem.from_pretrained(folder, policy(disk))
    with pytest.raises(WeightsError, match="holds no"):
        tiermem.from_pretrained(disk, policy(disk), build=GPT)


def transformers_model(name: str) -> Any:
    """A small model of transformers, its weights all drawn: initial ones are zeros and ones in part."""
    size = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    make: dict[str, Any] = {
        "gpt2": lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        ),
        "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**size, **heads, num_key_value_heads=2)),
        "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**size, **heads, num_local_experts=4)),
        "t5": lambda t: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "vit": lambda t: t.ViTForImageClassification(
            t.ViTConfig(
                **{k: v for k, v in size.items() if k != "vocab_size"}, **heads, image_size=16, patch_size=4
            )
        ),
    }
    net = make[name](transformers)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.02)
    return net


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "vit"])
def test_a_folder_of_transformers_is_the_model_that_was_saved(name: str, tmp_path: Path, disk: Path) -> None:
    torch.manual_seed(0)
    net = transformers_model(name)
    net.save_pretrained(
        tmp_path, max_shard_size="20KB"
    )  # vit's and mixtral's under the names of older releases
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with tiermem.from_pretrained(tmp_path, policy(disk)) as model:
        assert type(model.module) is type(net)
        assert not model.training
        assert not model.module.training
        assert_same("state", net.state_dict(), model.state_dict())
        if name == "llama":
            tokens = torch.randint(0, 61, (1, 7))
            settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(tokens, **settings), net.eval().generate(tokens, **settings))


SCRIPT = """
import json, sys
import torch
import tiermem
from tests.test_weights import save_folder
from tiermem.trainer.gpt import GPT, GPTShape

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
config = {"host": {"budget": "16MiB"}, "disk": {"paths": [sys.argv[1]]}, "precision": {"parameters": "bfloat16"}}
small = sys.argv[1] + "/small"
import os; os.mkdir(small)
save_folder(__import__("pathlib").Path(small), GPT(GPTShape(layers=1, width=64)).state_dict(), 1)
tiermem.from_pretrained(small, config, build=lambda: GPT(GPTShape(layers=1, width=64))).close()
base = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
model = tiermem.from_pretrained(sys.argv[2], config, build=lambda: GPT(GPTShape(layers=8, width=512)))
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()) * 4, "peak": status("VmHWM") - base,
    "host": model.stats()["tiers"]["host"], "sum": model.blocks[7].mlp[0].weight.double().sum().item(),
}))
model.close(restore=False)
"""


def test_memory_is_the_budget_and_a_little(tmp_path: Path, disk: Path) -> None:
    from tiermem.trainer.gpt import GPT as Large
    from tiermem.trainer.gpt import GPTShape

    state = Large(GPTShape(layers=8, width=512)).state_dict()
    save_folder(tmp_path, state, 2)
    expected = state["blocks.7.mlp.0.weight"].bfloat16().double().sum().item()
    del state
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(disk), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["sum"] == expected
    assert found["parameters"] > 95 << 20
    assert (
        found["peak"] <= (16 + 8 + 12) << 20
    )  # the budget, what is being converted, modules and late imports
