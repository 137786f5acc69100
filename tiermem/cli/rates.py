"""What ``tiermem plan`` takes a machine to be: sizes and rates as people write them, tables, and measurements.

Rates of devices are the peaks of their makers' data sheets, dense, with the accumulation that training uses.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tiermem.errors import ConfigError

if TYPE_CHECKING:
    from tiermem.planner.model import Decoder
    from tiermem.planner.shape import Training

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([KMBT]?)", re.IGNORECASE)
FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Peak(NamedTuple):
    """One device: memory in GiB, TFLOP/s in bfloat16 and in float32, and where the figures are from."""

    gib: int
    bf16: float
    fp32: float
    source: str


DEVICES = {
    "RTX 3090": Peak(24, 71, 35.6, "NVIDIA Ampere GA102 whitepaper"),
    "RTX 4090": Peak(24, 165, 82.6, "NVIDIA Ada whitepaper"),
    "L4": Peak(24, 121, 30.3, "NVIDIA L4 data sheet"),
    "L40S": Peak(48, 362, 91.6, "NVIDIA L40S data sheet"),
    "A100": Peak(80, 312, 19.5, "NVIDIA A100 data sheet"),
    "H100": Peak(80, 989, 67, "NVIDIA H100 SXM data sheet"),
    "H200": Peak(141, 989, 67, "NVIDIA H200 SXM data sheet"),
}
# For a size alone, the slower devices that have so much: a promise that a slower one can't keep is worth nothing.
BY_SIZE = ((24, "RTX 3090"), (48, "L40S"), (80, "A100"), (1 << 30, "H200"))

CPU_TFLOPS = 1.0
"""Of a server's cpu in float32, where nobody says: 16 cores with AVX2 at 2 GHz."""
MAX_WIDTH, MAX_TOKENS = 2048, 4096
"""Of the layer that is measured: in float32 its matrices, their gradients and all that it keeps take 1.2 GiB."""
EFFORT = 8e-5
"""Seconds that beginning and ending a transfer takes of whoever computes, found in traces of runs on Zen 3 (62 to 92
us)."""
UPDATE = 40e9
"""Bytes per second of the optimizer's update in RAM, where nobody says: two channels of DDR5."""


def count(option: str, text: str) -> int:
    """A number of things as people write it: "70B", "124M", "1.5T", "1000000". Raises ConfigError."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f'{option}: read "{text}"; allowed is a number, such as "70B", "124M" or "1000000"')
    return round(float(match[1]) * FACTORS[match[2].upper()])


def size(option: str, text: str) -> int:
    """Bytes as in the policy file, without percentages. Raises ConfigError."""
    from tiermem.config import Size

    try:
        nbytes = Size.parse(text).nbytes
    except ValueError as error:
        raise ConfigError(f'{option}: read "{text}": {error}; allowed is a size, such as "128GiB"') from None
    if nbytes is None:
        raise ConfigError(
            f'{option}: read "{text}", which is a percentage; allowed is a size, such as "128GiB"'
        )
    return nbytes


def rate(option: str, text: str) -> float:
    """Bytes per second: "7GB/s". Raises ConfigError."""
    return float(size(option, text.strip().removesuffix("/s")))


def disks(texts: list[str]) -> tuple[int, float, float]:
    """Bytes, and bytes per second read and written, of all disks: "2TB@7GB/s", or "2TB@7GB/s,5GB/s" where writing is
    slower. Raises ConfigError.
    """
    nbytes, read, write = 0, 0.0, 0.0
    for text in texts:
        capacity, _, rates = text.partition("@")
        if not rates:
            raise ConfigError(
                f'--nvme: read "{text}"; allowed is "2TB@7GB/s", or "2TB@7GB/s,5GB/s" with the rate of writes'
            )
        first, _, second = rates.partition(",")
        nbytes += size("--nvme", capacity)
        read += rate("--nvme", first)
        write += rate("--nvme", second or first)
    return nbytes, read, write


def gpu(text: str) -> tuple[int, str]:
    """A device's bytes and its name in the table, of "24GiB" or "H100". Raises ConfigError."""
    wanted = text.strip().upper().replace("-", " ")
    for name, peak in DEVICES.items():
        if wanted in (name, name.replace(" ", "")):
            return peak.gib << 30, name
    if not text.strip()[:1].isdigit():
        raise ConfigError(
            f'--gpu: read "{text}"; allowed is a size, such as "24GiB", or {", ".join(DEVICES)}'
        )
    nbytes = size("--gpu", text)
    return nbytes, next(name for gib, name in BY_SIZE if nbytes <= gib << 30)


def layer_flops(shape: Decoder, training: Training, cuda: bool, seconds: float = 1.5) -> float:
    """FLOP per second of one layer's forward and backward, counted as the planner counts them; the median of several.

    The layer has the model's width and heads and takes a batch's tokens, both within limits, so that the measurement
    fits memory: beyond them the rate hardly changes.
    """
    import torch

    from tiermem.planner.shape import attention_flop, forward_flop
    from tiermem.trainer.gpt import Block

    head = max(1, shape.width // shape.heads)
    heads = max(1, min(shape.width, MAX_WIDTH) // head)
    width = heads * head
    sequence = min(training.sequence, MAX_TOKENS)
    batch = max(1, min(training.batch, MAX_TOKENS // sequence))
    taken = replace(training, batch=batch, sequence=sequence)
    layer = Block(width, heads).to("cuda" if cuda else "cpu", training.dtype)
    x = torch.randn(batch, sequence, width).to("cuda" if cuda else "cpu", training.dtype).requires_grad_()
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 4:
        start = time.perf_counter()
        layer(x).sum().backward()
        if cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        layer.zero_grad()
        x.grad = None
    flop = forward_flop(12 * width * width, taken) + attention_flop(replace(shape, query_width=width), taken)
    return 3 * flop / statistics.median(took[1:])  # the first allocates


def copy_rate(nbytes: int = 256 << 20) -> float:
    """Bytes per second from pinned memory to the CUDA device, the best of three."""
    import torch

    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def update_rate(part: int, elements: int = 1 << 23) -> float:
    """Bytes per second of the optimizer's update on this machine, in parts of ``part`` elements, as a run has them.

    At 28 bytes an element; the median of five.
    """
    import torch

    from tiermem.trainer.kernel import Hyper, Kernel

    elements = max(elements, part)
    arrays = [torch.zeros(elements) for _ in range(4)]
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    took = []
    with Kernel() as kernel:
        for step in range(1, 7):
            start = time.perf_counter()
            for first in range(0, elements, part):
                parameter, gradient, exp_avg, exp_avg_sq = (each[first:].data_ptr() for each in arrays)
                kernel.update(
                    parameter=parameter,
                    parameter_dtype=torch.float32,
                    gradient=gradient,
                    gradient_dtype=torch.float32,
                    master=0,
                    exp_avg=exp_avg,
                    exp_avg_sq=exp_avg_sq,
                    count=min(part, elements - first),
                    hyper=hyper,
                    step=step,
                    grad_scale=1.0,
                )
            took.append(time.perf_counter() - start)
    return 28.0 * elements / statistics.median(took[1:])  # in the first, memory is had


def disk_here(folder: Path) -> tuple[int, float, float]:
    """Bytes free in the folder, and bytes per second read and written, as ``doctor`` measures them. Raises OSError."""
    from tiermem.cli import machine

    space, speed = machine.disk_space(folder).figures, machine.disk_speed(folder).figures
    return space["free"], speed["read"], speed["write"]
