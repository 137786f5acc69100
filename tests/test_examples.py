"""The examples run as they stand, and leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiermem import Config

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checkpoint", "the same losses from there on: True"),
        ("distributed", "rank 0 of 1: at most"),
        ("finetune", "step 10: loss"),
        ("inference", "the same as without paging: True"),
        ("large", "the same as built and trained in memory: True"),
        ("accelerate_loop", "batch 20: loss"),
        ("hf_trainer", "B saved, of a model of"),
        ("lightning_fit", "an ordinary module again: True"),
        ("parallel", "process 0 of 1 (pp, dp, tp: "),
    ],
)
def test_example(name, words, disk):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=disk,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert words in done.stdout
    assert list(disk.iterdir()) == []


def test_the_durable_one_goes_on(disk):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for steps, words in ((3, "0 steps are made\nstep 1: loss"), (5, "3 steps are made\nstep 4: loss")):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "durable.py"), "--steps", str(steps)],
            cwd=disk,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout.startswith(words)
        assert f"step {steps}: loss" in done.stdout
    assert [each.name for each in disk.iterdir()] == ["durable-run"]


def test_the_policy_is_accepted():
    assert Config.load(EXAMPLES / "policy.toml").host.budget.nbytes == 512 << 20


def test_all_examples_are_tested():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == [
        "accelerate_loop",
        "checkpoint",
        "distributed",
        "durable",
        "finetune",
        "hf_trainer",
        "inference",
        "large",
        "lightning_fit",
        "parallel",
    ]
