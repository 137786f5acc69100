"""The training step of benchmarks/outofcore.py in DeepSpeed ZeRO-3 with optimizer and parameters on NVMe, one rank.

    PYTHON benchmarks/peers/deepspeed_step.py --steps N --dtype float32|bfloat16 --path FOLDER

Needs an interpreter with torch, deepspeed and ninja, libaio's headers and a C++ compiler (the first run builds
extensions, for minutes). The settings are the smallest buffers that we found to run this model. Prints one JSON line:
seconds of each step, losses, VmHWM in bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import deepspeed
import torch


def load_gpt() -> Any:
    """The model's file by itself: tiermem isn't installed beside the peer."""
    path = Path(__file__).parents[2] / "trainer" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--path", required=True)
    options = parser.parse_args()
    gpt = load_gpt()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": int(1e8),
            "stage3_max_live_parameters": int(1e8),
            "stage3_prefetch_bucket_size": int(5e7),
            "offload_optimizer": {
                "device": "nvme", "nvme_path": options.path, "pin_memory": False,
                "buffer_count": 10, "pipeline_read": True, "pipeline_write": True,
            },
            "offload_param": {
                "device": "nvme", "nvme_path": options.path, "pin_memory": False,
                "buffer_count": 5, "buffer_size": int(1.1e8),
            },
        },
        "aio": {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 1000000,
    }  # fmt: skip
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = gpt.GPT(gpt.GPTShape(vocabulary=50257, sequence=256, layers=12, width=768, heads=12, tied=True))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(options.steps):
        x = torch.randint(0, 50257, (2, 256), generator=generator)
        start = time.perf_counter()
        logits = engine(x)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    print(json.dumps({"seconds": seconds, "losses": losses, "peak": int(peak.split()[1]) * 1024}))


if __name__ == "__main__":
    main()
