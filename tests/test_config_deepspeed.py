"""DeepSpeed's configurations become policy files, and nothing in them is passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tiermem import Config, ConfigError
from tiermem.cli import app
from tiermem.config.deepspeed import Fate, translate

OFFLOAD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "sub_group_size": 1000000000,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme0", "pin_memory": True, "buffer_count": 5},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme0", "pipeline_read": True},
        "zero_quantized_weights": True,
    },
    "aio": {"block_size": 1048577, "queue_depth": 8, "thread_count": 1, "use_gds": False},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "mystery": {"key": 1},
}


def write(folder: Path, settings: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return path


def test_every_key_has_a_verdict(tmp_path: Path) -> None:
    config, verdicts = translate(write(tmp_path, OFFLOAD))
    assert config == Config(
        ranks={"stage": 2, "reduce": "float32"},
        placement={"parameters": "disk", "optimizer": "disk"},
        disk={"paths": ["/nvme0"]},
        host={"pinned": "auto"},
        precision={"parameters": "bfloat16"},
        io={"request": 1048576, "depth": 8},
    )
    fates = {each.key: each.fate for each in verdicts}
    assert len(fates) == len(verdicts)
    taken = {key for key, fate in fates.items() if fate is Fate.TAKEN}
    zero = "zero_optimization"
    assert taken == {
        "bf16.enabled",
        f"{zero}.stage",
        *(f"{zero}.offload_param.{key}" for key in ("device", "nvme_path", "pin_memory")),
        *(f"{zero}.offload_optimizer.{key}" for key in ("device", "nvme_path")),
        "aio.block_size",
        "aio.queue_depth",
        "communication_data_type",
    }
    expected = {
        "train_micro_batch_size_per_gpu": Fate.SCRIPT,
        "gradient_accumulation_steps": Fate.SCRIPT,
        "gradient_clipping": Fate.SCRIPT,
        "fp16.enabled": Fate.NOT_NEEDED,
        "fp16.loss_scale": Fate.NOT_SUPPORTED,
        f"{zero}.overlap_comm": Fate.NOT_NEEDED,
        f"{zero}.sub_group_size": Fate.NOT_NEEDED,
        f"{zero}.offload_param.buffer_count": Fate.NOT_NEEDED,
        f"{zero}.offload_optimizer.pipeline_read": Fate.NOT_NEEDED,
        f"{zero}.zero_quantized_weights": Fate.NOT_SUPPORTED,
        "aio.thread_count": Fate.NOT_NEEDED,
        "aio.use_gds": Fate.NOT_SUPPORTED,
        "optimizer": Fate.SCRIPT,
        "scheduler": Fate.SCRIPT,
        "wall_clock_breakdown": Fate.NOT_NEEDED,
        "flops_profiler": Fate.NOT_NEEDED,
        "mystery.key": Fate.NOT_SUPPORTED,
    }
    assert {key: fate for key, fate in fates.items() if key not in taken} == expected
    assert all(each.why for each in verdicts)
    why = {each.key: each.why for each in verdicts}
    assert why["optimizer"] == "tiermem.trainer.AdamW(model.parameters(), lr=0.0001, betas=(0.9, 0.95))"
    assert "no such key" in why["mystery.key"]


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, {}),
        ({"fp16": {"enabled": True}}, {"precision": {"parameters": "float16"}}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
            {"placement": {"optimizer": "host"}, "host": {"pinned": False}},
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, {"ranks": {"stage": 3}}),
        ({"bf16": {"enabled": "auto"}}, {}),
    ],
)
def test_what_is_taken(settings: dict[str, Any], policy: dict[str, Any], tmp_path: Path) -> None:
    config, _ = translate(write(tmp_path, settings))
    assert config == Config(**policy)


@pytest.mark.parametrize(
    ("kind", "fate", "words"),
    [("Adam", Fate.SCRIPT, "trainer.AdamW"), ("Lamb", Fate.NOT_SUPPORTED, "Adam's and AdamW's")],
)
def test_optimizers(kind: str, fate: Fate, words: str, tmp_path: Path) -> None:
    _, verdicts = translate(write(tmp_path, {"optimizer": {"type": kind, "params": {}}}))
    (verdict,) = (each for each in verdicts if each.key == "optimizer")
    assert verdict.fate is fate
    assert words in verdict.why


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", "this is not JSON"),
        ("[]", "read a list"),
        ({"zero_optimization": {"stage": 7}}, r"ranks\.stage: read 7"),
        ({"aio": {"queue_depth": 0}}, r"io\.depth: read 0"),
    ],
)
def test_what_is_refused(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        translate(write(tmp_path, settings))
    with pytest.raises(ConfigError, match="can't be read"):
        translate(tmp_path / "nothing.json")


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, OFFLOAD)
    out = tmp_path / "policy.toml"
    done = CliRunner().invoke(app, ["config", "from-deepspeed", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "not supported: there is no such key" in done.output
    assert Config.load(out) == translate(path)[0]
    again = CliRunner().invoke(app, ["config", "from-deepspeed", str(path), "--out", str(out)])
    assert again.exit_code == 2
    assert "--out" in again.output
    shown = CliRunner().invoke(app, ["config", "from-deepspeed", str(path), "--json"])
    figures = json.loads(shown.stdout)
    assert figures["policy"] == out.read_text()
    assert {row["fate"] for row in figures["keys"]} == {fate.value for fate in Fate}
