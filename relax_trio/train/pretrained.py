"""Hugging Face checkpoint directories as the trainer loads and saves them. Not covered: tokenizers and resume state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from relax_trio.errors import ConfigError, boundary

_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def default_device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(path: Path, device: torch.device) -> torch.nn.Module:
    """Load a checkpoint directory as a float32 causal LM on `device`. Blocking; for a worker thread.

    Raises:
      ConfigError: not a checkpoint of a causal LM, unreadable, or tensors are missing or misshapen.
    """
    with boundary(ConfigError, f"checkpoint {path} cannot be loaded", *_LOAD_ERRORS), _quiet():
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    model: torch.nn.Module
    model, info = loaded
    # transformers would fill these with random numbers.
    lacking = sorted({*map(str, info["missing_keys"]), *(str(item[0]) for item in info["mismatched_keys"])})
    if lacking:
        raise ConfigError(f"checkpoint {path} lacks {len(lacking)} tensors of its model: {', '.join(lacking[:5])}")
    for parameter in model.parameters():
        # Fresh memory: kernels may round differently by alignment, and loaded weights can lie anywhere in a file.
        parameter.data = parameter.data.to(device, copy=True)
    return model.to(device)


def save_model(model: torch.nn.Module, directory: Path) -> None:
    """Write weights and model configuration into `directory`. Blocking.

    Raises:
      OSError, RuntimeError, SafetensorError: a file could not be written.
    """
    with _quiet():
        model.save_pretrained(directory)  # type: ignore[operator]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' progress bars: the terminal belongs to the run."""
    log: Any = transformers.utils.logging
    enabled = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            log.enable_progress_bar()
