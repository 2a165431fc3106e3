"""Low-rank adapters (LoRA) by PEFT: the model keeps its weights, each chosen layer gets two small matrices beside them.

W' = W + (alpha / rank) * B A, A (rank, in) random, B (out, rank) zero at first (Hu et al. 2021, arXiv:2106.09685).
Engine and checkpoints get W', under the names of the plain model; the matrices alone are kept beside it. Not covered:
layers that are no linear ones, and the output layer, whose logits are made in chunks without its module (head.py).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relax_trio.backend.base import AdapterWeights
from relax_trio.config.tree import TrainConfig
from relax_trio.errors import ConfigError, boundary

ADAPTER_DIR = "adapter"
"""Directory of the adapter in a checkpoint, in PEFT's layout: `PeftModel.from_pretrained` takes it."""

_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""How the names of all matrices begin in PEFT's files."""


def add_adapter(model: torch.nn.Module, train: TrainConfig) -> None:
    """Give the model an adapter; from here on nothing else of it is trained.

    Raises:
      ConfigError: PEFT isn't installed, or `--lora-target-modules` names no layer that can have one.
    """
    assert train.lora_rank is not None, "only with --lora-rank"
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as exc:
        raise ConfigError(f"--lora-rank needs the package peft ({exc}); install relax-trio[lora]") from exc
    targets: Any = list(train.lora_target_modules)
    config = peft.LoraConfig(
        r=train.lora_rank,
        lora_alpha=train.lora_alpha_or_default,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    with boundary(ConfigError, f"--lora-target-modules {' '.join(targets)}", ValueError, TypeError):
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    head_of = getattr(model, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    for name, module in model.named_modules():
        odd = _NAME in getattr(module, "lora_embedding_A", ())
        if odd or (_has_matrices(module) and (module is head or not _is_linear(module))):
            raise ConfigError(f"--lora-target-modules: {name} is no linear layer inside the model; leave it out")


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether `add_adapter` was called on the model."""
    return bool(_layers(model))


def plain_name(name: str) -> str | None:
    """Name of a parameter in the plain model; None for the adapter's own."""
    if f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name:
        return None
    return name.replace(".base_layer.", ".")


def merged(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the plain model that does what the model with its adapter does.

    Args:
      model: says which layers have an adapter, and its scale.
      tensors: parameters by the model's own names, whole.

    Returns:
      Tensors by plain names: W' where a layer has an adapter, else those given.
    """
    found = {plain: tensor for name, tensor in tensors.items() if (plain := plain_name(name)) is not None}
    for name, layer in _layers(model).items():
        a, b = tensors[f"{name}.lora_A.{_NAME}.weight"], tensors[f"{name}.lora_B.{_NAME}.weight"]
        weight = found[f"{name}.weight"]
        found[f"{name}.weight"] = weight + (b @ a).mul_(layer.scaling[_NAME]).to(weight.dtype)
    return found


def adapter_of(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> AdapterWeights:
    """The adapter by itself.

    Args:
      tensors: as for `merged`.
    """
    peft_config: Any = model.peft_config
    config = json.loads(json.dumps({**peft_config[_NAME].to_dict(), "inference_mode": True}, default=sorted))
    return AdapterWeights(config=config, tensors=_own(tensors))


def save_adapter(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the adapter in PEFT's layout into `directory`, which is made.

    Args:
      tensors: as for `merged`.

    Raises:
      OSError, SafetensorError: it could not be written.
    """
    directory.mkdir()
    save_file({name: tensor.cpu().contiguous() for name, tensor in _own(tensors).items()}, directory / _WEIGHTS)
    config: Any = model.peft_config
    config[_NAME].save_pretrained(directory)


def load_adapter(model: torch.nn.Module, directory: Path) -> None:
    """Take over the matrices of a saved adapter.

    Raises:
      ConfigError: it is damaged, or of another rank, scale or choice of layers.
    """
    with boundary(ConfigError, f"adapter {directory}", OSError, SafetensorError, ValueError, KeyError):
        saved = load_file(directory / _WEIGHTS)
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        scale = config["lora_alpha"] / config["r"]
    own = _own(dict(model.named_parameters()))
    scales = {layer.scaling[_NAME] for layer in _layers(model).values()}
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in own.items()} or scales != {scale}:
        raise ConfigError(
            f"adapter {directory}: is of other layers, rank or alpha than --lora-target-modules, --lora-rank and "
            "--lora-alpha say; resume with those it was trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _layers(model: torch.nn.Module) -> dict[str, Any]:
    """Layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if _has_matrices(module)}


def _has_matrices(module: torch.nn.Module) -> bool:
    return _NAME in getattr(module, "lora_A", ())


def _is_linear(layer: Any) -> bool:
    return isinstance(layer.get_base_layer(), torch.nn.Linear)


def _own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's matrices by the names in PEFT's files."""
    return {_peft_name(name): tensor for name, tensor in tensors.items() if plain_name(name) is None}


def _peft_name(name: str) -> str:
    return PEFT_PREFIX + name.replace(f".{_NAME}.", ".")
