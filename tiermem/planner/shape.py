"""The shape of training, and what follows from it: activations in bytes, arithmetic in FLOP.

Activations are counted as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4.1: what each operation of a layer keeps for backward. Their ``s b h (34 + 5 a s / h)``
bytes of a half-precision layer become 32 s b h, or 16 elements for each position and each of h, since there is no
dropout here (its masks are 2 of the 34), and since attention that doesn't materialise its scores (Dao et al.,
"FlashAttention", arXiv:2205.14135) keeps one float for each head and position in place of the 5 a s / h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiermem.config import Config
from tiermem.config.sections import DurabilitySection
from tiermem.errors import ConfigError
from tiermem.planner.model import Decoder

ALLOCATOR = 1.08
"""Bytes that activations take of the process for each of their own: what malloc leaves unused between tensors. Measured
on the cpu with glibc; a device's allocator is taken to be alike."""

MAX_ACCUMULATION = 1024
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Training:
    """``batch`` sequences of ``sequence`` tokens in each of ``accumulation`` passes of a step.

    ``precision``: "bf16" (with float32 master weights) or "fp32". With ``checkpointing`` only what goes into a layer is
    kept, and the layer is computed again in backward. ``durability`` and ``commits`` are the policy file's
    ``durability.mode`` and ``durability.commits``. Raises ConfigError for sizes below 1 and what isn't known.
    """

    batch: int = 1
    sequence: int = 2048
    precision: str = "bf16"
    accumulation: int = 1
    checkpointing: bool = False
    durability: str = "off"
    commits: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: read {getattr(self, name)}; allowed are numbers from 1 up")
        if self.accumulation > MAX_ACCUMULATION:
            raise ConfigError(
                f"--accumulation: read {self.accumulation}; allowed are numbers up to {MAX_ACCUMULATION}, since each "
                "pass is gone through"
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(f'--precision: read "{self.precision}"; allowed is {" or ".join(PRECISIONS)}')
        Config.load({"durability": {"mode": self.durability, "commits": self.commits}})

    @property
    def every(self) -> int | None:
        """How many steps apart commits are; 0 for those that are asked for, None without any."""
        return DurabilitySection(mode=self.durability).every

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, gradients and activations."""
        return PRECISIONS[self.precision]

    @property
    def pass_tokens(self) -> int:
        """Tokens in one forward and backward."""
        return self.batch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens in a step, of one rank."""
        return self.pass_tokens * self.accumulation


def layer_nbytes(shape: Decoder, training: Training) -> int:
    """What one layer keeps for backward, in bytes."""
    h, q, kv, m = shape.width, shape.query_width, shape.kv_width, shape.inner
    # Into and out of both norms; query, key, value and what attention gives; what goes into and out of the activation.
    elements = 4 * h + (q + 2 * kv) + q + 2 * m
    if shape.gated:
        # The product of gate and up besides both; the norms are RMS norms, written out, which keep a float32 copy each.
        elements += 2 * m + 2 * h * 4 // training.dtype.itemsize
    return training.pass_tokens * (elements * training.dtype.itemsize + 4 * shape.heads)


def activation_nbytes(shape: Decoder, training: Training) -> int:
    """The most that is there at one time of what forward keeps and backward makes, gradients of weights left out.

    It is at the end of forward: all layers, and the logits with their gradient; or, once the head's are gone, the
    gradients inside of the last layer.
    """
    size, tokens = training.dtype.itemsize, training.pass_tokens
    layer = layer_nbytes(shape, training)
    kept = shape.layers * layer
    if training.checkpointing:
        kept = shape.layers * tokens * shape.width * size + layer
    head = tokens * shape.width * size * 2  # into the last norm and out of it
    # Log-probabilities in float32 and their gradient; in half precision also the logits and theirs, in both formats.
    logits = tokens * shape.vocabulary * (8 if size == 4 else 8 + 2 * size)
    inside = tokens * size * (2 * shape.inner + 2 * shape.width)
    return int(ALLOCATOR * (kept + head + max(logits, inside)))


def forward_flop(matrix_elements: int, training: Training) -> float:
    """FLOP of one pass through matrices: 2 for each element and token (Kaplan et al., arXiv:2001.08361)."""
    return 2.0 * matrix_elements * training.pass_tokens


def attention_flop(shape: Decoder, training: Training) -> float:
    """FLOP of one layer's scores and mixing in one forward, half of the square for the causal mask."""
    return 2.0 * training.pass_tokens * training.sequence * shape.query_width
