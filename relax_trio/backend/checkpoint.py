"""Hugging Face checkpoint directories as model weights: loaded completely or not at all, without progress bars.

What engine and trainer have in common. Not covered: tokenizers, devices, which kinds of models either can use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from relax_trio.errors import ConfigError, boundary

LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What transformers raises over a checkpoint that it can't read."""

_N_SHOWN = 5


def require_config(path: Path) -> None:
    """Raise ConfigError unless `path` looks like a checkpoint: transformers would take it for a name to download."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: no config.json, so it cannot be loaded as a checkpoint; give a Hugging Face checkpoint directory"
        )


def load_causal_lm(path: Path, dtype: torch.dtype, *, with_images: bool = False) -> torch.nn.Module:
    """Load a checkpoint directory as a causal LM in CPU memory. Blocking; for a worker thread.

    Args:
      with_images: as one that reads images too.

    Raises:
      ConfigError: not a checkpoint of a causal LM, unreadable, or tensors are missing or misshapen, which transformers
        would fill with random numbers.
    """
    require_config(path)
    if not with_images:
        _refuse_image_model(path)
    with boundary(ConfigError, f"checkpoint {path} cannot be loaded", *LOAD_ERRORS), no_progress_bars():
        auto: Any = transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM
        loaded: Any = auto.from_pretrained(str(path), dtype=dtype, local_files_only=True, output_loading_info=True)
    model: torch.nn.Module
    model, info = loaded
    lacking = sorted({*map(str, info["missing_keys"]), *(str(item[0]) for item in info["mismatched_keys"])})
    if lacking:
        raise ConfigError(f"checkpoint {path} lacks {some_names(lacking)}")
    return model


def _refuse_image_model(path: Path) -> None:
    """Raise ConfigError where a model can be loaded with its vision tower only; transformers would list all others."""
    with boundary(ConfigError, f"{path}: config.json can't be read", OSError, ValueError):
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type") if isinstance(config, dict) else None
    names: Any = transformers.models.auto.modeling_auto
    if kind in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{path}: a {kind} model reads images, and the embedded engine text only; serve it with --rollout-backend "
            "sglang, and train it if its image processor is Qwen2-VL's"
        )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hold back transformers' progress bars: the terminal belongs to the run."""
    log: Any = transformers.utils.logging
    enabled = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            log.enable_progress_bar()


def some_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are: a model has thousands of tensors."""
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return ", ".join(names[:_N_SHOWN]) + more
