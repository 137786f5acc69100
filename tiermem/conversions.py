"""Conversions: which tensors of a transformers model its files have under other names, or in pieces.

transformers renames some models' tensors as it loads them, and makes one out of several (the experts of a layer, for
one). How is written down in its tables, which are asked here; where they are missing, nothing is converted.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.weights import Weights


class Conversions:
    """What transformers' tables say of the tensors in ``weights`` for the module ``net`` with tensors ``names``."""

    def __init__(self, net: nn.Module, names: set[str], weights: Weights) -> None:
        self.renamed: dict[str, str] = {}  # the module's name -> the file's
        self._net: Any = net
        self._made: dict[
            str, Any
        ] = {}  # the module's name -> the converter with its tensors, still to be read
        tables = _tables(net)
        if tables is None:
            return
        loading, transforms = tables
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        known = dict.fromkeys(names, True)
        for key in sorted(weights, key=loading.dot_natural_key):  # the order of experts, which are numbered
            name, pattern = loading.rename_source_key(
                key, renamings, converters, self._net.base_model_prefix, known
            )
            if name not in names:
                continue
            if pattern is None:
                self.renamed.setdefault(name, key)
            else:
                converter = self._made.setdefault(name, copy.deepcopy(by_pattern[pattern]))
                converter.add_tensor(name, key, pattern, partial(weights.tensor, key))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are made of several, by the module's names; one conversion is in memory at a time."""
        for first, converter in self._made.items():
            for name, value in converter.convert(first, model=self._net, config=self._net.config).items():
                yield name, value[0] if isinstance(value, list) else value


def _tables(net: nn.Module) -> tuple[Any, list[Any]] | None:
    """transformers' module of conversions, and those of the model; None for other models, and releases without."""
    if not hasattr(net, "base_model_prefix") or not hasattr(net, "config"):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        return loading, list(mapping.get_model_conversion_mapping(net))
    except (ImportError, AttributeError):
        return None
