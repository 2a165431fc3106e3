"""Hugging Face checkpoint directories as the trainer loads and saves them. Not covered: tokenizers and resume state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from relax_trio.backend.checkpoint import load_causal_lm, no_progress_bars
from relax_trio.train.images import open_images


def default_device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(path: Path, device: torch.device) -> torch.nn.Module:
    """Load a checkpoint directory as a float32 causal LM on `device`. Blocking; for a worker thread.

    Raises:
      ConfigError: not a checkpoint of a causal LM, unreadable, or tensors are missing or misshapen.
    """
    model = load_causal_lm(path, torch.float32, with_images=open_images(path) is not None)
    for parameter in model.parameters():
        # Fresh memory: kernels may round differently by alignment, and loaded weights can lie anywhere in a file.
        parameter.data = parameter.data.to(device, copy=True)
    return model.to(device)


def checkpoint_names(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Parameters by the names of the checkpoint that `model` was loaded from. Models with images have others inside."""
    if getattr(model.config, "vision_config", None) is None:
        return tensors
    hugging_face: Any = model
    renamed: Mapping[str, torch.Tensor] = revert_weight_conversion(hugging_face, dict(tensors))
    return renamed


def save_model(model: torch.nn.Module, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write weights and model configuration into `directory`, as a plain model. Blocking.

    Args:
      model: gives the configuration and what is no parameter.
      tensors: its parameters, see `weights.snapshot`.

    Raises:
      OSError, RuntimeError, SafetensorError: a file could not be written.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in own}
    hugging_face: Any = model
    with no_progress_bars():
        hugging_face.save_pretrained(directory, state_dict={**tensors, **buffers})
