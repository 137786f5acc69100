"""Pretrained models: a Hugging Face folder streamed into pages, without the model ever being in memory."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.config import Config, Source
from tiermem.conversions import Conversions
from tiermem.deferral import Deferral, deferral_of
from tiermem.deferred import deferring
from tiermem.device import Device
from tiermem.errors import ConfigError
from tiermem.module import TieredModule
from tiermem.recipe import FromWeights, Recipe
from tiermem.weights import Weights, WeightsError


def from_pretrained(
    folder: str | os.PathLike[str],
    config: Source = None,
    *,
    build: Callable[[], nn.Module] | None = None,
    strict: bool = True,
    device: Device | None = None,
) -> TieredModule:
    """A paged model with the weights of a folder: safetensors files are read straight into pages.

    Args:
        folder: a local folder with ``model.safetensors``, or several files and their index, or one such file.
        config: as for :class:`tiermem.TieredModule`.
        build: makes the module; its own initialisers don't run. Without it, the class that the folder's
            ``config.json`` names is taken from ``transformers``, which must be installed.
        strict: refuse where parameters have no weights. Otherwise the module is built with its initialisers, and those
            parameters keep what these give.
        device: as for :class:`tiermem.TieredModule`.

    Weights are found by the module's names, with or without the prefix of transformers' base model, and by
    transformers' own tables where it names or stacks them otherwise; tensors that only the files have are left alone.
    Parameters keep the dtype that they are built with, or take ``precision.parameters``; values are converted on the
    way, and masters keep what that loses. In memory at a time are the pages, as the budget allows, and 8 MiB (or one
    tensor that is stacked). A model of transformers is in evaluation mode, as its own ``from_pretrained`` has it.

    Raises:
        WeightsError: no weights, damaged ones, other shapes, or (with ``strict``) weights that are missing.
        ConfigError, BudgetError: as for TieredModule; also without ``build`` where there is no such class.
    """
    loaded = Config.load(config)
    with Weights(folder) as weights:
        with deferring(loaded, draw=not strict) as deferral, torch.no_grad():
            net = (build or (lambda: _build(Path(folder))))()
            missing = _load(net, weights, deferral)
        if missing and strict:
            raise WeightsError(
                f"{folder}: has no weights for {len(missing)} tensors of the module, among them {missing[:4]}; it has "
                f"{len(weights)}, such as {list(weights)[:4]}. Build the module that they were saved from, or say "
                "strict=False to keep its own initial values"
            )
        return TieredModule(net, loaded, device=device)


def _load(net: nn.Module, weights: Weights, deferral: Deferral) -> list[str]:
    """Say where the values of the module's tensors come from; returns the names of those that have none."""
    tensors = list(_tensors(net))
    by_name = {name: tensor for names, tensor in tensors for name in names}
    conversions = Conversions(net, set(by_name), weights)
    converted = set()
    for name, value in conversions:
        _check(weights, name, tuple(value.shape), name, by_name[name])
        by_name[name].copy_(value)
        converted.add(id(by_name[name]))
    missing = []
    for names, tensor in tensors:
        keys = [key for name in names for key in _keys(net, name, conversions)]
        found = next((key for key in keys if key in weights), None)
        if found is not None:
            _check(weights, found, weights[found].shape, names[0], tensor)
            if deferral_of(tensor) is deferral:
                deferral.give(tensor, Recipe(FromWeights(weights, found)))
            else:
                tensor.copy_(weights.tensor(found))
        elif id(tensor) not in converted:
            missing.append(names[0])
    return missing


def _check(weights: Weights, key: str, shape: tuple[int, ...], name: str, tensor: torch.Tensor) -> None:
    if shape != tuple(tensor.shape):
        raise WeightsError(
            f"{weights.path}: {key} has shape {list(shape)}, and the module's {name} {list(tensor.shape)}"
        )


def _tensors(net: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The parameters and persistent buffers of a module, each once, with all their names."""
    names: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), ([], parameter))[0].append(name)
    for path, module in net.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                names.setdefault(id(buffer), ([], buffer))[0].append(f"{path}.{key}" if path else key)
    return iter(names.values())


def _keys(net: nn.Module, name: str, conversions: Conversions) -> list[str]:
    """What a tensor of the module may be called in the files."""
    prefix = getattr(net, "base_model_prefix", "")
    keys = [name, *([conversions.renamed[name]] if name in conversions.renamed else [])]
    if not isinstance(prefix, str) or not prefix:
        return keys
    return [*keys, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _build(folder: Path) -> nn.Module:
    """The module that a Hugging Face folder's ``config.json`` describes."""
    path = folder / "config.json"
    try:
        read: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = [str(name) for name in read.get("architectures") or ()]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: does not say which model this is ({error}); give from_pretrained build=, which makes the module"
        ) from error
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{path}: describes a model of transformers, which is not installed: install it, or give build="
        ) from error
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise ConfigError(
            f"{path}: architectures is {names}, and transformers {transformers.__version__} has no such class; "
            "give build="
        )
    net: nn.Module = kind._from_config(transformers.AutoConfig.from_pretrained(folder))
    if (folder / "generation_config.json").exists() and hasattr(net, "generation_config"):
        net.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return net.eval()
