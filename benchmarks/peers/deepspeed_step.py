"""The training step of benchmarks/outofcore.py in DeepSpeed ZeRO-3, offloaded to NVMe or to CPU memory, one rank.

    PYTHON benchmarks/peers/deepspeed_step.py --build [CPUAdamBuilder ...]
    PYTHON benchmarks/peers/deepspeed_step.py --offload nvme|cpu|none --dtype float32|bfloat16 --steps N --path FOLDER

Needs an interpreter with torch, deepspeed and ninja beside it, libaio's headers and a C++ compiler. ``--build`` makes
DeepSpeed's extensions (minutes, once). The sizes are the least that we found to run this model: a sub-group and a
parameter's buffer hold the embedding, the largest tensor; with less than 4 buffers it fails, ``--pipeline`` with less
than 12. Prints one JSON line: seconds of each step, losses, and VmHWM in bytes from after the engine was made, also as
growth over the interpreter with DeepSpeed imported.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LARGEST = 50257 * 768  # elements of the embedding
EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "tiermem" / "deepspeed")

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",  # else gloo looks the host's name up, which may not resolve
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],  # its ninja
}


def hold_extensions() -> int:
    """Take the folder of extensions for this process, and remove what a killed build left there.

    torch marks a build by a file named ``lock`` that nobody removes when the build is killed, and the next process
    waits for it to go, for ever and without a word. With the folder held, whatever lock is there has no owner.
    """
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    held = os.open(EXTENSIONS / "held", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()
    return held


def build(names: list[str]) -> None:
    """Compile extensions, by default those that the step loads."""
    from deepspeed.accelerator import get_accelerator

    for name in names or ("ShareMemCommBuilder", "PinMemoryBuilder", "CPUAdamBuilder", "AsyncIOBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            builder.load()


def load_gpt() -> Any:
    """The model's file by itself: tiermem isn't installed beside the peer."""
    path = Path(__file__).parents[2] / "trainer" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": options.sub_group,
        "stage3_max_live_parameters": options.sub_group,
        "stage3_prefetch_bucket_size": options.sub_group // 2,
    }
    if options.offload != "none":
        zero["offload_optimizer"] = {"device": options.offload, "pin_memory": False}
    if options.offload == "nvme":
        zero["offload_optimizer"] |= {
            "nvme_path": options.path,
            "buffer_count": options.buffers,
            "pipeline_read": options.pipeline,
            "pipeline_write": options.pipeline,
        }
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": options.path,
            "pin_memory": False,
            "buffer_count": options.parameter_buffers,
            "buffer_size": LARGEST + 1024,
        }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, losses and memory of the steps."""
    import deepspeed
    import torch

    base = memory("VmRSS")
    gpt = load_gpt()
    config = settings(options)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    # not under zero.Init, which partitions a parameter before the model has initialised it: losses of other weights
    net = gpt.GPT(gpt.GPTShape(vocabulary=50257, sequence=256, layers=12, width=768, heads=12, tied=True))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    Path("/proc/self/clear_refs").write_text("5")
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(options.steps):
        x = torch.randint(0, 50257, (2, 256), generator=generator)
        start = time.perf_counter()
        logits = engine(x)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]).float(), x[:, 1:].reshape(-1)
        )
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        print(f"step {seconds[-1]:.1f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    peak = memory("VmHWM")
    return {"seconds": seconds, "losses": losses, "peak": peak, "growth": peak - base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", nargs="*", help="only build DeepSpeed's extensions, print their folder")
    parser.add_argument("--offload", default="nvme", choices=["nvme", "cpu", "none"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--path", help="a folder for the files of --offload nvme")
    parser.add_argument("--sub-group", type=int, default=LARGEST + 1024, help="elements updated at once")
    parser.add_argument("--buffers", type=int, default=4, help="of a sub-group, for the optimizer's state")
    parser.add_argument("--parameter-buffers", type=int, default=3, help="of the largest parameter")
    parser.add_argument("--pipeline", action="store_true", help="read and write beside the update")
    options = parser.parse_args()
    if options.offload == "nvme" and options.build is None and not options.path:
        parser.error("--offload nvme needs --path")
    held = hold_extensions()
    try:
        if options.build is not None:
            build(options.build)
            print(EXTENSIONS)
        else:
            print(json.dumps(measure(options)))
    finally:
        os.close(held)


if __name__ == "__main__":
    main()
