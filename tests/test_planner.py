"""The planner: sizes of known models, forecasts against real runs, and what the command prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiermem
from tests.conftest import Wrap
from tests.models import GPT as SmallGPT
from tiermem.cli import app, rates
from tiermem.errors import ConfigError
from tiermem.planner import (
    Hardware,
    Training,
    best,
    forecast,
    from_config,
    from_object,
    from_sizes,
    try_changes,
)
from tiermem.planner.shape import activation_nbytes
from tiermem.policies.timeline import Link
from tiermem.trainer import AdamW

DISK = Link(1e9, 1e9, 5e-5)
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
}  # fmt: skip
LLAMA_3_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_2_500M = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def machine(**changed: Any) -> Hardware:
    return replace(Hardware(4 << 30, 1e11, 2e10, 10**11, DISK), **changed)


@pytest.fixture
def run() -> Any:
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return lambda *arguments: runner.invoke(app, ["plan", *map(str, arguments)])


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# -- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GPT2, 124_439_808), (LLAMA_3_70B, 70_553_706_496), (QWEN_2_500M, 494_032_768)],
)
def test_a_config_json_gives_the_models_published_size(
    tmp_path: Path, config: dict[str, Any], parameters: int
) -> None:
    assert from_config(written(tmp_path, config)).num_parameters == parameters


def test_fields_that_are_missing_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA_3_70B.items() if key not in ("vocab_size", "hidden_size")}
    with pytest.raises(ConfigError, match=r"config.json: there is no hidden_size, no vocab_size"):
        from_config(written(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPT2, "n_embd": "wide"}, "n_embd: read 'wide'"),
        ({"model_type": "mamba"}, "'mamba' is of no family"),
        ({**LLAMA_3_70B, "num_local_experts": 8}, "has experts"),
        ({**LLAMA_3_70B, "num_key_value_heads": 3}, "not divisible by num_key_value_heads 3"),
        ({**LLAMA_3_70B, "num_hidden_layers": 10**12}, "from 1 to 10,000"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(written(tmp_path, config))


def test_sizes_give_a_model_of_that_many_parameters() -> None:
    for parameters, layers in ((70_000_000_000, 80), (124_000_000, 12)):
        assert from_sizes(parameters, layers).num_parameters == pytest.approx(parameters, rel=0.002)
    with pytest.raises(ConfigError, match="leave nothing for the MLPs"):
        from_sizes(1_000_000, 4, width=1024)


def test_an_object_is_read_off_its_modules() -> None:
    model = from_object("tests.test_planner:demo")
    assert model.num_parameters == 57_146_880
    assert next(model.net.parameters()).is_meta
    same = from_sizes(57_146_880, 8, width=768, vocabulary=256, heads=12)
    training = Training(4, 64, "fp32")
    expected = activation_nbytes(same.decoder, training)
    assert activation_nbytes(model.decoder, training) == pytest.approx(expected, rel=0.01)
    with pytest.raises(ConfigError, match="no_such"):
        from_object("tests.test_planner:no_such")


def demo() -> torch.nn.Module:
    from tiermem.trainer.gpt import GPT, GPTShape

    return GPT(GPTShape(sequence=64, layers=8, width=768, heads=12))


# -- forecasts ----------------------------------------------------------------------------------------------

PEAK = """
import json, sys, torch, tiermem
from tests.test_planner import demo
from tiermem.trainer import AdamW

budget, batch, folder = json.loads(sys.argv[1])
tokens = torch.randint(0, 256, (batch, 64))
model = tiermem.TieredModule(demo(), {
    "device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [folder]}
})
optimizer = AdamW(model.parameters(), lr=1e-3)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts anew: building the module on the host isn't the run
for _ in range(3):
    model(tokens, tokens).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
with open("/proc/self/status") as lines:
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""
PROCESS = """
import tests.test_planner
from tiermem.planner.process import _SCRIPT
exec(_SCRIPT)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "batch"), [(256 << 20, 2), (384 << 20, 8)])
def test_peak_memory_is_predicted_within_five_percent(disk: Path, budget: int, batch: int) -> None:
    def child(script: str, *arguments: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    # The test's own imports are in the child too, and are no part of a training process.
    hardware = machine(ram_nbytes=24 << 30, host_budget=budget, process_nbytes=child(PROCESS))
    predicted = forecast(from_object("tests.test_planner:demo"), hardware, Training(batch, 64, "fp32"))
    actual = child(PEAK, json.dumps([budget, batch, str(disk)]))
    print(f"predicted {predicted.peak_nbytes:,}, actual {actual:,}: {predicted.peak_nbytes / actual:.3f}")
    assert predicted.peak_nbytes == pytest.approx(actual, rel=0.05)


def test_the_bytes_of_a_step_are_those_of_a_real_one(wrap: Wrap) -> None:
    """The same cut, the same schedule, the same plan: what the forecast carries is what a run's live plan does."""
    net = SmallGPT(256, 128, 6, 32)
    budget = 2 << 20
    with torch.device("meta"):
        shadow = SmallGPT(256, 128, 6, 32)
    model = from_object("tests.test_planner:demo")
    from tiermem.planner.model import Model, inspect

    found = forecast(
        Model("small", shadow, inspect(shadow)), machine(host_budget=budget), Training(2, 32, "fp32")
    )
    assert found.fits, found.reason
    paged = wrap(net, host=budget)
    optimizer = AdamW(paged.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 32))
    for _ in range(4):
        torch.nn.functional.cross_entropy(paged(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    explained = paged.explain()
    assert found.num_units == len(paged.units)
    for ours, theirs in (("disk to host", "disk_to_host"), ("host to disk", "host_to_disk")):
        assert found.carried[ours] == pytest.approx(explained.predicted[theirs], rel=0.1)
    assert model.num_parameters  # the demo is another model


def test_more_ram_moves_less_and_enough_moves_nothing() -> None:
    model = from_sizes(8_000_000, 4, width=384, vocabulary=256)
    found = [
        forecast(model, machine(host_budget=budget << 20), Training(4, 64, "fp32"))
        for budget in (48, 96, 2048)
    ]
    moved = [sum(each.carried.values()) for each in found]
    assert moved[0] > moved[1] > moved[2] == 0
    assert found[0].step > found[1].step > found[2].step
    assert found[2].disk_nbytes == 0
    assert found[0].nbytes_written_a_day > 0


@pytest.mark.parametrize("budget", [2, 64])
def test_commits_take_space_and_write_what_the_plan_does_not(budget: int, disk: Path) -> None:
    from tiermem.planner.model import Model, inspect

    net = SmallGPT(256, 128, 6, 32)
    with torch.device("meta"):
        shadow = SmallGPT(256, 128, 6, 32)
    model = Model("small", shadow, inspect(shadow))
    off = forecast(model, machine(host_budget=budget << 20), Training(2, 32, "fp32"))
    once = forecast(model, machine(host_budget=budget << 20), Training(2, 32, "fp32", durability="step"))
    state = sum(kind["nbytes"] for kind in off.state.values())
    changing = state * 3 // 4  # gradients are in no commit
    assert once.disk_nbytes == pytest.approx(state + changing, rel=0.01)
    twice = forecast(
        model, machine(host_budget=budget << 20), Training(2, 32, "fp32", durability="every:10", commits=2)
    )
    assert twice.disk_nbytes == pytest.approx(state + 2 * changing, rel=0.01)
    written = [each.carried.get("host to disk", 0) for each in (off, twice, once)]
    assert written[1] - written[0] == pytest.approx((written[2] - written[0]) / 10, rel=0.01)
    assert written[2] >= changing
    assert once.step == pytest.approx(off.step + once.waits["commits"])
    assert once.policy()["durability"] == {"mode": "step", "commits": 1}
    none = forecast(
        model,
        machine(host_budget=budget << 20, disk_nbytes=state),
        Training(2, 32, "fp32", durability="step"),
    )
    assert not none.fits
    assert 'durability.mode = "step" and durability.commits = 1' in none.reason
    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": budget << 20},
        "disk": {"paths": [str(disk)]},
        "durability": {"mode": "step"},
    }
    with tiermem.TieredModule(net, config) as paged:
        optimizer = AdamW(paged.parameters(), lr=1e-3)
        x = torch.randint(0, 256, (2, 32))
        before = 0
        for step in range(5):
            paged(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                before = paged.stats()["nbytes_written_to_disk"]
        moved = paged.stats()["nbytes_written_to_disk"] - before
        assert paged._runtime.disk.used == pytest.approx(once.disk_nbytes, rel=0.01)
        assert once.carried["host to disk"] == pytest.approx(moved, rel=0.1)
        explained = paged.explain()
        assert explained.predicted["host_to_disk"] == pytest.approx(moved, rel=0.1)
        assert any("has 2 places with durability.mode" in note for note in explained.notes)


def test_what_does_not_fit_says_why_and_what_would() -> None:
    model = from_sizes(8_000_000, 4, width=384, vocabulary=256)
    small = forecast(model, machine(host_budget=2 << 20), Training(4, 64, "fp32"))
    assert not small.fits
    assert "smallest" in small.reason or "needs" in small.reason
    no_disk = forecast(model, machine(host_budget=48 << 20, disk_nbytes=0), Training(4, 64, "fp32"))
    assert not no_disk.fits
    wide = forecast(model, machine(device_nbytes=2 << 30), Training(512, 2048, "bf16"))
    assert not wide.fits
    assert "checkpointing" in wide.reason


def test_the_best_change_is_the_one_forecast_to_be() -> None:
    model = from_sizes(8_000_000, 4, width=384, vocabulary=256)
    before = forecast(model, machine(host_budget=48 << 20, flops=1e13), Training(4, 64, "fp32"))
    assert before.bottleneck == "disk"
    found = try_changes(before)
    assert [change.gain for change in found] == sorted((change.gain for change in found), reverse=True)
    gains = {change.name: change.gain for change in found}
    assert gains["a second disk like the first"] > 1.5 > gains["twice the arithmetic"]
    helps = best(found)
    assert helps is not None
    assert helps.gain == max(gains.values())


def test_a_device_has_a_link_of_its_own() -> None:
    model = from_sizes(57_000_000, 8, width=768, vocabulary=256)
    hardware = machine(ram_nbytes=8 << 30, device_nbytes=int(1.1 * (1 << 30)))
    found = forecast(model, hardware, Training(4, 64, "bf16"))
    assert found.fits, found.reason
    assert found.carried["host to device"] > 0
    assert set(found.busy) >= {"compute", "optimizer", "pcie"}


# -- a live model -------------------------------------------------------------------------------------------


def test_explain_has_predicted_and_actual(wrap: Wrap) -> None:
    model = wrap(SmallGPT(256, 128, 6, 32), host=2 << 20)
    assert model.explain().actual == {}
    optimizer = AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 32))
    for _ in range(8):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    explained = model.explain()
    assert explained.steps == 7
    for link in ("disk_to_host", "host_to_disk"):
        assert explained.actual[link] == pytest.approx(explained.predicted[link], rel=0.25)
    assert explained.predicted["step_seconds"] is not None
    assert explained.placement["parameters"]["nbytes"] > 0
    data = explained.to_dict()
    assert json.loads(json.dumps(data)) == data
    text = str(explained)
    assert "predicted" in text
    assert "median of 7" in text
    assert "bottleneck" in text


def test_explain_where_everything_fits(wrap: Wrap) -> None:
    model = wrap(SmallGPT(), host="1GiB")
    tokens = torch.randint(0, 67, (2, 16))
    for _ in range(2):
        model(tokens).sum().backward()
        model.zero_grad()
    explained = model.explain()
    assert explained.predicted["disk_to_host"] == 0
    assert "nothing moves" in str(explained)


# -- the command --------------------------------------------------------------------------------------------

SIZES = ("--params", "8M", "--layers", "4", "--width", "384", "--vocabulary", "256")
SHAPE = ("--batch", "4", "--sequence", "64", "--precision", "fp32", "--tflops", "0.2")


def test_the_command_answers_and_writes_a_policy_that_loads(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    arguments = (*SIZES, *SHAPE, "--ram", "8GiB", "--nvme", "100GB@1GB/s", "--host-budget", "48MiB")
    result = run(*arguments, "--endurance", "600TBW", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["fits"]
    assert answer["endurance_days"] == pytest.approx(600e12 / answer["nbytes_written_a_day"])
    assert answer["best_change"] in [change["change"] for change in answer["changes"]]
    assert answer["assumed"]
    config = tiermem.Config.load(out)
    assert config.host.budget.nbytes == 48 << 20
    assert config.precision.parameters == "float32"
    refused = run(*arguments, "--out", out)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    people = run(*arguments, "--out", out, "--force")
    assert people.exit_code == 0, people.output
    for word in ("it fits", "bottleneck", "tokens/s", "what would help most", "Assumed"):
        assert word in people.stdout


def test_what_does_not_fit_exits_with_one(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    result = run(
        "--params", "70B", "--layers", 80, "--gpu", "24GiB", "--ram", "64GiB", "--out", out, "--no-advice"
    )
    assert result.exit_code == 1, result.output
    assert "it doesn't fit" in result.stdout
    assert not out.exists()


def test_a_host_budget_above_what_the_machine_has_does_not_fit(run: Any) -> None:
    asked = (*SIZES, "--ram", "1GiB", "--nvme", "1TB@3GB/s", "--no-advice", "--sequence", 64, "--json")
    assert run(*asked, "--host-budget", "100MiB").exit_code == 0
    result = run(*asked, "--host-budget", "100MiB", "--batch", 10_000)
    assert result.exit_code == 1, result.output
    assert "the machine has 1.00 GiB" in json.loads(result.stdout)["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --params"),
        (("--params", "70B", "--ram", "1GiB"), "needs --layers"),
        (("--params", "many", "--layers", 2, "--ram", "1GiB"), "--params"),
        ((*SIZES,), "--here"),
        ((*SIZES, "--ram", "80%"), "percentage"),
        ((*SIZES, "--ram", "1GiB", "--nvme", "2TB"), "2TB@7GB/s"),
        ((*SIZES, "--ram", "1GiB", "--gpu", "Voodoo"), "RTX 4090"),
        ((*SIZES, "--ram", "1GiB", "--ranks", 8, "--out", "policy.toml"), "one process"),
        ((*SIZES, "--ram", "1GiB", "--batch", 0), "--batch"),
        ((*SIZES, "--ram", "1GiB", "--accumulation", 10**6), "up to 1024"),
        ((*SIZES, "--ram", "1GiB", "--pcie", "5GB/s"), "no device with memory of its own"),
        ((*SIZES, "--ram", "1GiB", "--path", "."), "with --here alone"),
        ((*SIZES, "--ram", "1GiB", "--commits", 3), "with --durability alone"),
        (("--params", "1000000000T", "--layers", 2, "--ram", "1GiB"), "--params"),
        (("--params", "1B", "--layers", 10**6, "--ram", "1GiB"), "--layers"),
    ],
)
def test_what_is_refused(run: Any, tmp_path: Path, monkeypatch: Any, arguments: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_here_is_measured(run: Any, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermem.cli.machine.SPEED_NBYTES", 4 << 20)
    result = run(
        *SIZES, "--here", "--path", disk, "--sequence", 64, "--precision", "fp32", "--no-advice", "--json"
    )
    assert result.exit_code in (0, 1), result.output
    said = "\n".join(json.loads(result.stdout)["assumed"])
    for what in ("RAM", "disk", "arithmetic", "optimizer", "a process without pages"):
        assert f"{what}: " in said
    assert list(disk.iterdir()) == []


def test_disks_add_up() -> None:
    assert rates.disks(["2TB@7GB/s", "1TB@3GB/s,2GB/s"]) == (3 * 10**12, 10e9, 9e9)
    assert rates.gpu("24GiB") == (24 << 30, "RTX 3090")
    assert rates.gpu("h100") == (80 << 30, "H100")
    assert rates.count("--params", "1.5B") == 1_500_000_000
