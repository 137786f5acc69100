"""Models without memory: a decoder's modules on the meta device, from sizes, a config.json or a Python callable."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
WIDTH_STEP = 128
HEAD_WIDTH = 128
MAX_PARAMETERS, MAX_LAYERS, MAX_SIZE = 10**14, 10_000, 10**7
"""What is planned for at most. Each layer is made, without memory."""
VOCABULARY = 32_000
"""Of a model given by sizes, where nobody says: that of Llama 2."""


@dataclass(frozen=True)
class Decoder:
    """The sizes that activations and arithmetic follow from; in elements.

    ``kv_width`` is the width of keys, and of values; ``inner`` that of the MLP, which is ``gated`` when three matrices
    make it (Shazeer, "GLU Variants Improve Transformer", 2020).
    """

    layers: int
    width: int
    query_width: int
    kv_width: int
    inner: int
    gated: bool
    vocabulary: int
    heads: int


@dataclass(frozen=True)
class Model:
    """A model to plan for: its modules on the meta device, what is assumed of it in words."""

    name: str
    net: nn.Module
    decoder: Decoder
    assumed: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained; tied ones count once."""
        return sum(parameter.numel() for parameter in self.net.parameters())


class _Norm(nn.Module):
    """The numbers of a layer norm (weight and bias) or an RMS norm (weight)."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        if bias:
            self.bias = nn.Parameter(torch.empty(width))


class _Block(nn.Module):
    """The tensors of one layer. It is never called."""

    def __init__(self, shape: Decoder, bias: bool, qkv_bias: bool, norm_bias: bool) -> None:
        super().__init__()
        self.attention_norm = _Norm(shape.width, norm_bias)
        self.query = nn.Linear(shape.width, shape.query_width, bias=qkv_bias)
        self.key = nn.Linear(shape.width, shape.kv_width, bias=qkv_bias)
        self.value = nn.Linear(shape.width, shape.kv_width, bias=qkv_bias)
        self.out = nn.Linear(shape.query_width, shape.width, bias=bias)
        self.mlp_norm = _Norm(shape.width, norm_bias)
        if shape.gated:
            self.gate = nn.Linear(shape.width, shape.inner, bias=bias)
        self.up = nn.Linear(shape.width, shape.inner, bias=bias)
        self.down = nn.Linear(shape.inner, shape.width, bias=bias)


class _Net(nn.Module):
    """The tensors of a decoder. It is never called."""

    def __init__(
        self,
        shape: Decoder,
        *,
        bias: bool = False,
        qkv_bias: bool = False,
        norm_bias: bool = False,
        tied: bool = False,
        positions: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        if positions:
            self.positions = nn.Embedding(positions, shape.width)
        self.blocks = nn.ModuleList(_Block(shape, bias, qkv_bias, norm_bias) for _ in range(shape.layers))
        self.norm = _Norm(shape.width, norm_bias)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def from_sizes(
    parameters: int,
    layers: int,
    *,
    width: int | None = None,
    vocabulary: int | None = None,
    heads: int | None = None,
) -> Model:
    """A decoder of about ``parameters`` numbers: untied embeddings, an MLP of two matrices, no biases.

    Without a ``width`` it is the one at which the MLP is four times as wide, rounded to 128; the MLP then takes what is
    left. Raises ConfigError where the sizes contradict each other.
    """
    words = VOCABULARY if vocabulary is None else vocabulary
    for name, value, most in (
        ("--params", parameters, MAX_PARAMETERS),
        ("--layers", layers, MAX_LAYERS),
        ("--vocabulary", words, MAX_SIZE),
        ("--width", WIDTH_STEP if width is None else width, MAX_SIZE),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name}: read {value:,}; allowed are numbers from 1 to {most:,}")
    if width is None:
        exact = (math.sqrt(words * words + 12 * layers * parameters) - words) / (12 * layers)
        width = max(1, round(exact / WIDTH_STEP)) * WIDTH_STEP if exact > WIDTH_STEP else max(1, round(exact))
    left = parameters - 2 * words * width - layers * (4 * width * width + 2 * width) - width
    inner = round(left / (2 * width * layers)) if width > 0 else 0
    if width < 1 or inner < 1:
        raise ConfigError(
            f"--params: read {parameters:,}; a width of {width:,} and a vocabulary of {words:,} leave nothing for the "
            f"MLPs of {layers} layers: give a smaller --width or --vocabulary"
        )
    heads = max(1, width // HEAD_WIDTH) if heads is None else heads
    if heads < 1 or width % heads:
        raise ConfigError(f"--heads: read {heads}; allowed are numbers that divide the width of {width:,}")
    shape = Decoder(layers, width, width, width, inner, False, words, heads)
    with torch.device("meta"):
        net = _Net(shape)
    said = f"width {width:,}, MLP {inner:,}, vocabulary {words:,}, untied: a decoder of this many parameters"
    return Model(f"{layers} layers, width {width}", net, shape, (said,))


def from_config(path: str | os.PathLike[str]) -> Model:
    """The model that a Hugging Face ``config.json`` describes: of GPT-2's or Llama's family.

    Raises ConfigError for a file that can't be read, fields that are missing or no sizes, and other families.
    """
    source = str(path)
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"it can't be read: {error.strerror}", source=source) from error
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error}", source=source) from error
    if not isinstance(read, dict):
        raise ConfigError(f"it holds a {type(read).__name__}; allowed is an object", source=source)
    fields = _Fields(read, source)
    kind = str(read.get("model_type", ""))
    if any(key in read for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ConfigError(
            f"model_type {kind!r} has experts, whose sizes aren't read: use --object", source=source
        )
    if kind == "gpt2" or "n_embd" in read:
        return _gpt2(fields, kind)
    if kind in LLAMA_LIKE or (
        "hidden_size" in read and "intermediate_size" in read and "rms_norm_eps" in read
    ):
        return _llama(fields, kind)
    raise ConfigError(
        f"model_type {kind!r} is of no family that is read (gpt2, {', '.join(LLAMA_LIKE)}, or what has Llama's "
        "fields): use --object, or --params and --layers",
        source=source,
    )


class _Fields:
    """The sizes in a config.json."""

    def __init__(self, read: dict[str, Any], source: str) -> None:
        self.read = read
        self.source = source

    def require(self, *names: str) -> None:
        """Raise ConfigError with all that is missing of ``names``."""
        missing = [name for name in names if self.read.get(name) is None]
        if missing:
            raise ConfigError(f"there is no {', no '.join(missing)}", source=self.source)

    def size(self, name: str, default: int | None = None) -> int:
        """The whole number above 0 of that name."""
        value = self.read.get(name)
        value = default if value is None else value
        most = MAX_LAYERS if name in ("n_layer", "num_hidden_layers") else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(
                f"{name}: read {value!r}; allowed are whole numbers from 1 to {most:,}", source=self.source
            )
        return value


def _gpt2(fields: _Fields, kind: str) -> Model:
    fields.require("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
    width = fields.size("n_embd")
    shape = Decoder(
        fields.size("n_layer"),
        width,
        width,
        width,
        fields.size("n_inner", 4 * width),
        False,
        fields.size("vocab_size"),
        fields.size("n_head"),
    )
    tied = bool(fields.read.get("tie_word_embeddings", True))
    with torch.device("meta"):
        net = _Net(
            shape,
            bias=True,
            qkv_bias=True,
            norm_bias=True,
            tied=tied,
            positions=fields.size("n_positions"),
        )
    return Model(kind or "gpt2", net, shape)


def _llama(fields: _Fields, kind: str) -> Model:
    fields.require(
        "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"
    )
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if "head_dim" not in fields.read and width % heads:
        raise ConfigError(
            f"hidden_size {width} is not divisible by num_attention_heads {heads}, and there is no head_dim",
            source=fields.source,
        )
    each, kv_heads = (
        fields.size("head_dim", max(1, width // heads)),
        fields.size("num_key_value_heads", heads),
    )
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}",
            source=fields.source,
        )
    shape = Decoder(
        fields.size("num_hidden_layers"),
        width,
        heads * each,
        kv_heads * each,
        fields.size("intermediate_size"),
        True,
        fields.size("vocab_size"),
        heads,
    )
    tied = bool(fields.read.get("tie_word_embeddings", False))
    attention_bias = bool(fields.read.get("attention_bias", kind == "qwen2"))
    with torch.device("meta"):
        net = _Net(shape, qkv_bias=attention_bias, tied=tied)
    known = kind in LLAMA_LIKE
    return Model(
        kind or "llama-like",
        net,
        shape,
        () if known else (f"model_type {kind!r} is read as Llama's: its fields have the same names",),
    )


def from_object(spec: str) -> Model:
    """The module that ``spec``, as "package.module:callable", makes when it is called on the meta device.

    The working directory is searched too. Raises ConfigError when there is no such callable, it fails, or no decoder's
    sizes can be read off its modules.
    """
    where, _, name = spec.partition(":")
    if not where or not name:
        raise ConfigError(f'--object: read {spec!r}; allowed is "package.module:callable"')
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(where)
        for part in name.split("."):
            made = getattr(made, part)
        with torch.device("meta"):
            net = made() if not isinstance(made, nn.Module) else made
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"--object {spec}: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"--object {spec}: it made a {type(net).__name__}; allowed is a torch.nn.Module")
    return Model(
        spec, net, inspect(net), ("the decoder's sizes are read off its Linear and Embedding modules",)
    )


def inspect(net: nn.Module) -> Decoder:
    """The sizes of a decoder, from its modules. Raises ConfigError where no repeated blocks of Linears are found."""
    lists = [module for module in net.modules() if isinstance(module, nn.ModuleList) and len(module)]
    embeddings = [module for module in net.modules() if isinstance(module, nn.Embedding)]
    blocks = max(lists, key=len, default=None)
    linears = [module for module in (blocks[0].modules() if blocks else ()) if isinstance(module, nn.Linear)]
    if blocks is None or not linears or not embeddings:
        raise ConfigError(
            "no embedding and no list of equal layers with Linear modules are found in the model: its activations and "
            "arithmetic can't be estimated"
        )
    width = embeddings[0].embedding_dim
    inner = max(
        linear.out_features for linear in linears if linear.out_features != 3 * width or len(linears) < 4
    )
    counts = Counter(linear.out_features for linear in linears if linear.in_features == width)
    narrow = min(counts)
    kv_width = width if 3 * width in counts else min(narrow, width)
    heads = next(
        (value for module in net.modules() if isinstance(value := getattr(module, "heads", None), int)),
        max(1, width // HEAD_WIDTH),
    )
    return Decoder(
        len(blocks),
        width,
        width,
        kv_width,
        inner,
        inner != width and counts[inner] > 1,
        max(each.num_embeddings for each in embeddings),
        heads,
    )
