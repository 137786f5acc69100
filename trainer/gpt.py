"""A GPT: a small decoder-only transformer in plain PyTorch, which knows nothing of paging.

Layer norm before each part, causal attention, a GELU MLP four times as wide as the model, learned positions, as in
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT. ``sequence`` is the longest input in tokens; ``heads`` must divide ``width``.

    Raises ValueError for a size below 1, or a width that the heads don't divide.
    """

    vocabulary: int = 256
    sequence: int = 256
    layers: int = 4
    width: int = 256
    heads: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "sequence", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is not divisible by {self.heads} heads")

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        width = self.width
        block = 12 * width * width + 13 * width
        embeddings = (self.vocabulary + self.sequence) * width
        head = 0 if self.tied else self.vocabulary * width
        return embeddings + self.layers * block + 2 * width + head


class Attention(nn.Module):
    """Causal self-attention with several heads; input and output are [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What each position takes from itself and those before it."""
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return out


class Block(nn.Module):
    """One layer: attention, then an MLP, each added to what came in; [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for its input."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A language model over ``shape.vocabulary`` tokens.

    ``model(tokens)`` gives logits [batch, sequence, vocabulary]; ``model(tokens, targets)`` the mean cross-entropy in
    nats per token, a float32 scalar. ``tokens`` and ``targets`` are int64 [batch, sequence]. Raises ValueError for a
    sequence longer than ``shape.sequence``.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        """Small normal weights, smaller where a layer adds to the residual stream, as GPT-2 has it."""
        residual = 0.02 / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=residual if adds else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss where there are targets."""
        length = tokens.shape[1]
        if length > self.shape.sequence:
            raise ValueError(
                f"a sequence of {length} tokens, where at most {self.shape.sequence} are allowed"
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
