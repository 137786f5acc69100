"""Small models of every odd kind, each with the data and the loss to train it with.

A :class:`Case` is what parity tests run twice: once as it is, once wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """A transformer block, pre-norm."""

    def __init__(self, dim: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.dropout(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """A decoder. ``tied``: the head is the embedding; ``saving``: blocks under checkpoint (reentrant or not)."""

    def __init__(
        self,
        vocabulary: int = 67,
        dim: int = 48,
        depth: int = 3,
        length: int = 16,
        *,
        tied: bool = False,
        dropout: float = 0.0,
        saving: bool | None = None,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList(Block(dim, dropout=dropout) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.saving = saving
        if tied:
            self.head.weight = self.wte.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x) if self.saving is None else checkpoint(block, x, use_reentrant=self.saving)
        return self.ln_f(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class HeadOutside(GPT):
    """The root computes with a parameter of another unit, outside of its owner's forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens), self.wte.weight) + self.head(self.wte.weight).mean()


class OddMLP(nn.Module):
    """No size divides another, and one parameter is a scalar that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(37, 301),
            nn.ReLU(inplace=True),
            nn.Linear(301, 127, bias=False),
            nn.Tanh(),
            nn.Linear(127, 13),
        )
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.gain


class ConvNet(nn.Module):
    """Convolutions with batch norm, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1, groups=4),
            nn.BatchNorm2d(48, affine=False),
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM and a GRU, which keep their weights in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 32)
        self.lstm = nn.LSTM(32, 40, num_layers=2, batch_first=True, dropout=0.2)
        self.gru = nn.GRU(40, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(tokens))
        x, _ = self.gru(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own transformer, which reads its projections' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.cross = nn.MultiheadAttention(32, 2, kdim=32, vdim=32, add_bias_kv=True, batch_first=True)
        self.head = nn.Linear(32, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))
        y, _ = self.cross(x, x.roll(1, 1), x)
        return self.head(x + y)


class Albert(nn.Module):
    """One block used three times over in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.block = Block(48)
        self.mixer = nn.Linear(48, 48)
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for _ in range(3):
            x = self.mixer(self.block(x)) + self.mixer(x)
        return self.head(x)


class Recursive(nn.Module):
    """A module that calls itself, and then its neighbour."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return self(x, depth=depth - 1) + x if depth else x


class Nested(nn.Module):
    """Calls of one module within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.stack = nn.ModuleList(Recursive() for _ in range(2))
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for each in self.stack:
            x = each(x)
        return self.head(x)


class Output(NamedTuple):
    """What :class:`Structured` blocks return."""

    hidden: Tensor
    extra: dict[str, Any]


class StructuredBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Linear(dim, 2 * dim)
        self.b = nn.Linear(2 * dim, dim)

    def forward(self, *, state: dict[str, Tensor], scale: float) -> Output:
        inner = F.relu(self.a(state["x"]), inplace=True)
        return Output(self.b(inner) * scale, {"inner": [inner], "note": "unused", "none": None})


class Structured(nn.Module):
    """Blocks that take and return nests, change their results in place, and leave one output unused."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.blocks = nn.ModuleDict({name: StructuredBlock(48) for name in "pqr"})
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(48)), nn.Parameter(torch.ones(1, 48))])
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.wte(tokens)
        for block in self.blocks.values():
            out = block(state={"x": x}, scale=0.5)
            out.hidden.add_(self.bias[0]).mul_(self.bias[1])
            x = x + out.hidden + out.extra["inner"][0].mean()
        return {"logits": self.head(x)}


class Views(nn.Module):
    """Weights used through views, transposes and slices; one not contiguous, one of size zero."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.slanted = nn.Parameter(torch.randn(96, 48).t() * 0.1)
        self.back = nn.Parameter(torch.randn(2, 48, 48) * 0.1)
        self.empty = nn.Parameter(torch.zeros(0, 48))
        self.mid = nn.Linear(48, 48)
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        y = (x @ self.slanted)[..., :48] @ self.back[0].t() + x @ self.back.flatten(0, 1)[10:58]
        y = y @ torch.cat([self.mid.weight, self.empty]).T + self.mid.weight.sum()
        return self.head(self.mid(y))


class Case(NamedTuple):
    """A model with its data and loss. ``build`` starts from the global random state."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Sequence[Tensor]]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]


def _tokens() -> Sequence[Tensor]:
    tokens = torch.randint(0, 67, (3, 17))
    return tokens[:, :-1], tokens[:, 1:]


def _token_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    out = model(batch[0])
    logits = out["logits"] if isinstance(out, dict) else out
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def _after_forward(model: Any, batch: Sequence[Tensor]) -> Tensor:
    return _token_loss(model, batch) + F.linear(model.wte.weight[:3], model.head.weight).float().pow(2).mean()


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _vectors() -> Sequence[Tensor]:
    return torch.randn(6, 37), torch.randint(0, 13, (6,))


def _images() -> Sequence[Tensor]:
    return torch.randn(4, 3, 9, 9), torch.randint(0, 10, (4,))


def _dense_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0].to(_dtype_of(model))).float(), batch[1])


def _frozen() -> nn.Module:
    net = GPT()
    net.wte.weight.requires_grad_(False)
    net.h[1].requires_grad_(False)
    net.h[2].ln1.requires_grad_(False)
    net.h[2].mlp[0].bias.requires_grad_(False)
    return net


def _channels_last() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CASES = [
    Case("gpt", GPT, _tokens, _token_loss),
    Case("gpt-tied", lambda: GPT(tied=True), _tokens, _token_loss),
    Case("gpt-dropout", lambda: GPT(dropout=0.2), _tokens, _token_loss),
    Case("gpt-frozen", _frozen, _tokens, _token_loss),
    Case("gpt-checkpoint", lambda: GPT(saving=False, dropout=0.1), _tokens, _token_loss),
    Case("gpt-checkpoint-reentrant", lambda: GPT(saving=True, dropout=0.1), _tokens, _token_loss),
    Case("head-outside", HeadOutside, _tokens, _token_loss),
    Case("after-forward", GPT, _tokens, _after_forward),
    Case("after-forward-tied", lambda: GPT(tied=True), _tokens, _after_forward),
    Case("odd-mlp", OddMLP, _vectors, _dense_loss),
    Case("conv", ConvNet, _images, _dense_loss),
    Case("conv-channels-last", _channels_last, _images, _dense_loss),
    Case("recurrent", Recurrent, _tokens, _token_loss),
    Case("encoder", Encoder, _tokens, _token_loss),
    Case("albert", Albert, _tokens, _token_loss),
    Case("nested", Nested, _tokens, _token_loss),
    Case("structured", Structured, _tokens, _token_loss),
    Case("views", Views, _tokens, _token_loss),
]
BY_NAME = {case.name: case for case in CASES}
