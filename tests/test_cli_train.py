"""The commands that train: what they print, what they refuse, and how they end."""

import json
import signal
import sys

import pytest
import torch
from typer.testing import CliRunner

from tiermem.cli import app, bench, demo, training
from tiermem.trainer.gpt import GPT, Block, GPTShape
from tiermem.trainer.loop import DivergedError, adamw, train, warmup_cosine

SMALL = ["--steps=4", "--batch=2", "--sequence=16", "--layers=4", "--width=32", "--heads=2"]
# Less than the 0.9 MB of training state that SMALL has.
BUDGET = "--host-budget", "384KiB"


@pytest.fixture
def run():
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return lambda *arguments: runner.invoke(app, [str(each) for each in arguments])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.mkdir()
    (path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    (path / "b.bin").write_bytes(b"\0" * 100)
    return path


@pytest.fixture
def small(run, text, disk):
    """`tiermem train` of a small model on the text, paged to ``disk``."""
    (disk / "policy.toml").write_text('[device]\nkind = "cpu"\n')
    common = ["train", text, *SMALL, "--policy", disk / "policy.toml", "--disk-path", disk / "pages"]
    return lambda *arguments: run(*common, *arguments)


def test_one_json_document_on_stdout(small, disk):
    result = small(*BUDGET, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["steps"] == len(figures["losses"]) == 4
    assert figures["tokens"] == 4 * 2 * 16
    assert figures["bits_per_byte_first"] == pytest.approx(figures["loss_first"] / 0.693147, rel=1e-5)
    # Four steps: the last loss is the mean of all but the first, and so are the rates.
    assert figures["steps_in_last_mean"] == 3
    assert figures["loss_last_mean"] == pytest.approx(sum(figures["losses"][1:]) / 3)
    after = 3 * figures["seconds_per_step_after_first"]
    assert figures["tokens_per_second_after_first"] * after == pytest.approx(3 * 2 * 16)
    assert after < figures["seconds"]
    assert figures["stall_fraction_after_first"] * after <= figures["stall_seconds"] + 1e-9
    assert (figures["interrupted"], figures["out_of_time"], figures["seconds_limit"]) == (False, False, None)
    assert (figures["files"], figures["files_skipped"]) == (1, 1)
    assert figures["parameters"] == GPTShape(sequence=16, layers=4, width=32, heads=2).num_parameters
    assert figures["nbytes_paged"] > 0
    host = figures["stats"]["tiers"]["host"]
    assert host["peak"] <= host["budget"] == 384 << 10
    assert "step 4/4: loss" in result.stderr
    assert list((disk / "pages").iterdir()) == []


def test_a_device_budget_without_a_device_is_said(run, text, disk, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("train", text, *SMALL, "--steps", 1, "--disk-path", disk, "--device-budget", "1GiB")
    assert result.exit_code == 0, result.output
    assert "device.budget: 1GiB is not used" in caplog.text  # Python prints what is logged on stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpaged_is_the_same_run(small, dtype):
    options = ["--json", "--dtype", dtype, "--accumulate", "2", "--tied"]
    paged = json.loads(small(*BUDGET, *options).stdout)
    plain = json.loads(small("--unpaged", *options).stdout)
    assert paged["losses"] == plain["losses"]
    assert plain["stats"] is None
    assert plain["nbytes_paged"] == 0


def test_for_people(small, disk):
    result = small(*BUDGET, "--trace", disk / "run.trace", "--save", disk / "model.pt")
    assert result.exit_code == 0, result.output
    for words in (
        "nats/byte",
        "bits/byte",
        "tokens/s",
        "the last is the mean of 3 steps",
        "a step after the first",
        "of 384.00 KiB",
        "1 skipped",
        "run.trace",
        "model.pt",
    ):
        assert words in result.stdout
    assert (disk / "run.trace").stat().st_size > 0
    state = torch.load(disk / "model.pt")
    GPT(GPTShape(sequence=16, layers=4, width=32, heads=2)).load_state_dict(state)
    assert sorted(path.name for path in disk.iterdir()) == ["model.pt", "pages", "policy.toml", "run.trace"]


@pytest.mark.parametrize("where", ["forward", "between steps"])
def test_interrupted(small, disk, monkeypatch, where):
    calls = 0

    def interrupting(function, at):
        def called(*arguments):
            nonlocal calls
            calls += 1
            if calls == at:
                signal.raise_signal(signal.SIGINT)
            return function(*arguments)

        return called

    if where == "forward":
        monkeypatch.setattr(Block, "forward", interrupting(Block.forward, 11))
    else:
        monkeypatch.setattr(training.Progress, "show", interrupting(training.Progress.show, 2))
    result = small(*BUDGET, "--json", "--save", disk / "model.pt")
    assert result.exit_code == 130, result.output
    figures = json.loads(result.stdout)
    assert figures["interrupted"]
    assert figures["steps"] == 2
    assert not (disk / "model.pt").exists()
    assert list((disk / "pages").iterdir()) == []


def test_nothing_is_left_when_a_run_fails(small, disk, monkeypatch):
    def fail(*_):
        raise DivergedError(1, float("nan"))

    monkeypatch.setattr(training.Progress, "show", fail)
    result = small(*BUDGET)
    assert result.exit_code == 2
    assert "lower the learning rate" in result.stderr
    assert list((disk / "pages").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "33"], "--width: read 33, which 2 heads don't divide"),
        (["--lr", "0"], "--lr: read 0.0"),
        (["--lr", "nan"], "--lr: read nan"),
        (["--clip", "inf"], "--clip: read inf"),
        (["--seed", str(2**64)], "--seed: read"),
        (["--sequence", "5000"], "too little for one sequence of 5000 bytes"),
        (["--host-budget", "much"], "host.budget"),
        (["--device-budget", "1GiB"], "device.budget"),
        (["--host-budget", "10KiB"], "the smallest host budget that would do"),
        (["--save", "/no/such/folder/model.pt"], "--save: there is no folder"),
        (["--save", "/"], "is a folder"),
        (["--steps", "0"], "--steps"),
        (["--heads", "-1"], "--heads"),
    ],
)
def test_refusals(small, arguments, message):
    result = small(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_refused_data(run, tmp_path):
    for make, message in (
        (lambda path: None, "No such file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: (path.unlink(), path.mkdir()), "no text files"),
    ):
        make(tmp_path / "data")
        result = run("train", tmp_path / "data", *SMALL)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr


def test_a_loss_that_is_no_number(text):
    class Broken(torch.nn.Linear):
        def forward(self, x, y):
            return super().forward(x).mean() * float("inf")

    model = Broken(1, 1)
    batch = torch.ones(1, 1), torch.ones(1, 1)
    with pytest.raises(DivergedError) as caught:
        list(train(model, adamw(model, 1e-3), iter([batch]), 1))
    assert caught.value.step == 1


def test_the_learning_rate_rises_and_falls():
    model = torch.nn.Linear(2, 2)
    optimizer = adamw(model, 1.0)
    schedule = warmup_cosine(optimizer, steps=20, warmup=4)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_parameters_are_counted_right():
    for tied in (False, True):
        shape = GPTShape(sequence=16, layers=2, width=32, heads=2, tied=tied)
        assert shape.num_parameters == sum(p.numel() for p in GPT(shape).parameters())


def test_a_gpt_looks_only_back():
    torch.manual_seed(0)
    model = GPT(GPTShape(sequence=8, layers=2, width=16, heads=2))
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    with pytest.raises(ValueError, match="9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.int64))


# -- demo ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shrunken(monkeypatch):
    """A demo of the same form that takes seconds."""
    for name, value in (("LAYERS", 4), ("WIDTH", 64), ("HEADS", 2), ("SEQUENCE", 16), ("BUDGET", "1MiB")):
        monkeypatch.setattr(demo, name, value)


def test_demo(run, disk, shrunken):
    result = run("demo", "--folder", disk / "demo", "--steps", 3)
    assert result.exit_code == 0, result.output
    for words in ("training state in memory, peak", "1.00 MiB", "tiermem trace summary", "nats/byte"):
        assert words in result.stdout
    assert [path.name for path in (disk / "demo").iterdir()] == ["run.trace"]
    assert run("trace", "summary", disk / "demo" / "run.trace").exit_code == 0


def test_demo_as_json(run, disk, shrunken):
    figures = json.loads(run("demo", "--folder", disk, "--steps", 3, "--json").stdout)
    assert figures["unpaged_state_nbytes"] == 16 * figures["parameters"]
    assert figures["host_peak_nbytes"] <= figures["host_budget_nbytes"] == 1 << 20
    assert figures["unpaged_state_nbytes"] > 3 * figures["host_budget_nbytes"]
    assert figures["steps"] == 3


def test_demo_stops_in_time(run, disk, shrunken):
    figures = json.loads(run("demo", "--folder", disk, "--seconds", 0, "--json").stdout)
    assert figures["steps"] == 1
    assert (figures["out_of_time"], figures["seconds_limit"], figures["interrupted"]) == (True, 0, False)
    assert figures["tokens_per_second_after_first"] is None  # there is only the first
    said = run("demo", "--folder", disk, "--seconds", 0).stdout
    assert "steps: 1 of 60, stopped by its time limit of 0 s" in said
    assert "tokens/s" in said


def test_demo_that_ends_with_its_steps_says_nothing_of_time(run, disk, shrunken):
    figures = json.loads(run("demo", "--folder", disk, "--steps", 1, "--seconds", 0, "--json").stdout)
    assert (figures["steps"], figures["out_of_time"]) == (1, False)


def test_demo_in_a_place_that_is_a_file(run, disk):
    (disk / "file").touch()
    result = run("demo", "--folder", disk / "file")
    assert result.exit_code == 2
    assert "can't be made" in result.stderr


# -- bench --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of benchmarks: one that prints, one with --json, one that writes JSON to a file, one that fails."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    parser = (
        "import argparse, json\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--quick', action='store_true')\n"
    )
    scripts = {
        "plain": "import sys\nprint('table', len(sys.argv))",
        "flag": parser
        + "parser.add_argument('--json', action='store_true')\nprint(json.dumps(vars(parser.parse_args())))",
        "file": parser
        + "parser.add_argument('--json')\npath = parser.parse_args().json\njson.dump([1], open(path, 'w'))",
        "fails": "import sys\nsys.exit(3)",
    }
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(f'"""The {name} one."""\n{script}\n')
    monkeypatch.setattr(bench, "_folder", lambda: folder)
    return folder


def test_bench_list(run, checkout):
    result = run("bench", "--list", "--json")
    assert json.loads(result.stdout)["flag"] == "The flag one."
    assert "The plain one." in run("bench", "--list").stdout


def test_bench_gives_each_script_what_it_takes(run, checkout):
    result = run("bench", "--json", "--quick", "plain", "flag", "file")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "plain": {"status": 0, "text": "table 1\n"},
        "flag": {"status": 0, "figures": {"quick": True, "json": True}},
        "file": {"status": 0, "figures": [1]},
    }


def test_bench_says_what_failed(run, checkout):
    result = run("bench", "fails")
    assert result.exit_code == 1
    assert "failed: fails" in result.stderr


def test_bench_refuses_names_it_does_not_know(run, checkout):
    result = run("bench", "nothing")
    assert result.exit_code == 2
    assert "allowed are fails, file, flag, plain" in result.stderr


def test_bench_without_a_checkout(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "tiermem" / "cli" / "bench.py"))
    result = run("bench")
    assert result.exit_code == 2
    assert "scripts of the source checkout" in result.stderr


def test_the_real_benchmarks_have_titles(run):
    titles = json.loads(run("bench", "--list", "--json").stdout)
    assert {"adam", "io", "trace"} <= set(titles)
    assert all(titles.values())


def test_quick_to_say_help():
    """The command line doesn't wait for torch to say what it can do."""
    import subprocess

    code = "import sys; from tiermem.cli import app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
