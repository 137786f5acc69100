"""What the README and the documents say: their code runs, their policies are accepted, their links lead somewhere."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tiermem
from tiermem.trainer.gpt import GPT, GPTShape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def names(tmp_path, disk, monkeypatch):
    """What the example takes for granted: a GPT, batches, and a policy that pages."""
    monkeypatch.chdir(tmp_path)
    policy = f'device.kind = "cpu"\nhost.budget = "512KiB"\ndisk.paths = ["{disk}"]\n'
    (tmp_path / "policy.toml").write_text(policy)
    torch.manual_seed(0)
    tokens = torch.randint(256, (3, 2, 17))
    batches = [(batch[:, :-1], batch[:, 1:]) for batch in tokens]
    return {
        "GPT": lambda _: GPT(GPTShape(sequence=16, layers=4, width=48, heads=2)),
        "batches": batches,
    }


def test_the_example_trains(names, disk):
    (example,) = fenced(README, "python")
    exec(example, names)
    stats = names["model"].module
    assert stats is names["net"]
    assert type(next(names["net"].parameters())) is torch.nn.Parameter
    assert not any(torch.isnan(parameter).any() for parameter in names["net"].parameters())
    assert float(names["loss"].detach()) < 6
    assert list(disk.iterdir()) == []


def test_the_example_also_as_with(names):
    (example,) = fenced(README, "python")
    lines = example.splitlines()
    inside = [f"    {line}" for line in lines[5:] if not line.startswith("model.close")]
    exec("\n".join([*lines[:4], "with tiermem.TieredModule(net, 'policy.toml') as model:", *inside]), names)


def test_the_policy_is_accepted():
    (policy,) = fenced(README, "toml")
    config = tiermem.Config.load(tomllib.loads(policy))
    assert config.host.budget.nbytes == 48 << 30


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("command", re.findall(r"^\| `tiermem ([a-z ]+?)[ `]", README, re.MULTILINE))
def test_the_commands_are_there(command):
    from typer.testing import CliRunner

    from tiermem.cli import app

    assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0


def test_the_lines_on_checkpoints_save_and_load(names):
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    save, load, look, background, series, torch_save, torch_load = fenced(text, "python")
    (example,) = fenced(README, "python")
    exec(example.replace("model.close()", "pass"), names)
    for write, read in ((save, load), (torch_save, torch_load)):
        exec(write, names)
        saved = {name: value.clone() for name, value in names["model"].state_dict().items()}
        with torch.no_grad():
            for parameter in names["model"].parameters():
                parameter.zero_()
        exec(read, names)
        assert all(torch.equal(value, saved[name]) for name, value in names["model"].state_dict().items())
    exec(background, names)
    exec(look, names)
    exec(series, names)
    names["model"].close()


def test_the_lines_on_traces_run(names, tmp_path):
    from typer.testing import CliRunner

    from tiermem.cli import app

    text = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ tiermem (trace (?:summary|export) .*?)(?: *#.*)?$", text, re.MULTILINE)
    assert len(lines) >= 3
    (trace,) = fenced(text, "toml")
    with (tmp_path / "policy.toml").open("a") as policy:
        policy.write(trace)
    exec(fenced(README, "python")[0], names)
    for line in lines:
        done = CliRunner().invoke(app, line.split())
        assert done.exit_code == 0, (line, done.output)
    assert (tmp_path / "run.json.gz").stat().st_size > 0
