"""A Hugging Face causal LM as the engine uses it: load, one forward pass over slot rows, replace the weights.

Not covered: which rows a pass covers (engine.py) and what is drawn from its logits (sampling.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from relax_trio.backend.base import WeightSource
from relax_trio.backend.checkpoint import LOAD_ERRORS, load_causal_lm, require_config, some_names
from relax_trio.backend.embedded.kv import KvSpec, KvStore
from relax_trio.backend.rope import constant_rope_len
from relax_trio.errors import ConfigError, WeightSyncError, boundary

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class ModelInfo:
    """What the checkpoint's `config.json` says, read without loading weights.

    Attributes:
      path: the checkpoint directory.
      vocab_len: number of token ids the model takes.
      max_position: longest context it was made for, in tokens; where its rotary embeddings change with the length,
        the longest under which they don't (rope.py).

    Raises:
      ConfigError: no readable checkpoint there, or a kind of model the engine can't serve.
    """

    def __init__(self, path: Path) -> None:
        require_config(path)
        with boundary(ConfigError, f"{path}: reading config.json", *LOAD_ERRORS):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        self.path = path
        self.text_config: Any = config.get_text_config()
        self.vocab_len = int(self.text_config.vocab_size)
        position = getattr(self.text_config, "max_position_embeddings", None)
        if not isinstance(position, int):
            raise ConfigError(f"{path}: config.json has no max_position_embeddings")
        self.max_position = min(position, constant_rope_len(config) or position)
        odd = set(getattr(self.text_config, "layer_types", None) or ()) - _LAYER_TYPES
        if odd:
            raise ConfigError(
                f"{path}: layers of type {', '.join(sorted(odd))} keep no plain keys and values; "
                "the embedded engine can't serve this model"
            )


class CausalModel:
    """The engine's own copy of the weights, in evaluation mode, used by one thread at a time."""

    def __init__(self, info: ModelInfo, *, dtype: torch.dtype, device: torch.device) -> None:
        self.info = info
        self.device = device
        self._module = load_causal_lm(info.path, dtype).to(device).eval().requires_grad_(False)
        parameters = inspect.signature(self._module.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keep_last: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        types = set(getattr(info.text_config, "layer_types", None) or ())
        window = getattr(info.text_config, "sliding_window", None)
        self._window: int | None = (
            window if isinstance(window, int) and (not types or len(types & {"sliding_attention"})) else None
        )
        self._mask_by_type = "sliding_attention" in types
        self.spec = self._probe(dtype)

    def plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (T, V) float32 of one sequence (T,) without any cache of ours: what the engine is checked against."""
        out = self._module(input_ids=ids[None], use_cache=False).logits[0]
        return torch.as_tensor(out, dtype=torch.float32)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, store: KvStore) -> torch.Tensor:
        """Run the store's plan and return the logits of every row's last token.

        Args:
          ids: (B, T) int64, each row's new tokens at its end, padding before them.
          positions: (B, T) int64, 0 on padding.
          store: holds the plan; gets the new keys and values.

        Returns:
          (B, V) float32.
        """
        cache = {self._cache_name: store.cache}
        out = self._module(
            input_ids=ids,
            attention_mask=self._mask(positions, store.plan.length),
            position_ids=positions,
            use_cache=True,
            **cache,
            **self._keep_last,
        )
        return torch.as_tensor(out.logits[:, -1], dtype=torch.float32)

    def replace(self, source: WeightSource) -> None:
        """Copy new weights over the old ones; either all of them or none.

        Raises:
          WeightSyncError: a tensor is missing, unknown or misshapen, tied tensors differ, or nothing can be read.
        """
        if source.tensors is not None:
            tensors = source.tensors
        elif source.path is not None:
            try:
                tensors = load_causal_lm(source.path, self.spec.dtype).state_dict()
            except ConfigError as exc:
                raise WeightSyncError(f"new weights can't be read: {exc}") from exc
        else:
            raise WeightSyncError("a weight source needs tensors or a path; this one has neither")
        own: dict[str, torch.Tensor] = self._module.state_dict()
        _check(own, {name for name, _ in self._module.named_parameters(remove_duplicate=False)}, tensors)
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks (B, 1, T, length): a token sees what is at or before its own position."""
        places = torch.arange(length, device=self.device)
        hidden = places > positions[:, :, None]
        dtype = self.spec.dtype
        full = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, torch.finfo(dtype).min)
        if self._window is None:
            return full[:, None]
        hidden |= places <= positions[:, :, None] - self._window
        sliding = torch.zeros_like(full).masked_fill_(hidden, torch.finfo(dtype).min)
        if not self._mask_by_type:
            return sliding[:, None]
        return {"full_attention": full[:, None], "sliding_attention": sliding[:, None]}

    def _probe(self, dtype: torch.dtype) -> KvSpec:
        """Find the shape of keys and values by running one token."""
        cache = DynamicCache()
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._module(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        layers: list[Any] = cache.layers
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers}
        if len(shapes) != 1 or len(cache.layers) != self.info.text_config.num_hidden_layers:
            raise ConfigError(
                f"{self.info.path}: layers differ in their keys and values; the embedded engine needs one shape"
            )
        (_, n_heads, _, key_dim), (_, _, _, value_dim) = shapes.pop()
        return KvSpec(
            n_layers=len(cache.layers),
            n_heads=n_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            device=self.device,
        )


def _check(own: Mapping[str, torch.Tensor], needed: set[str], new: Mapping[str, torch.Tensor]) -> None:
    """Refuse `new` unless it covers every parameter, under at least one of its names, and nothing else.

    Args:
      own: state dict of the model; tied tensors appear under each of their names.
      needed: names of parameters; what else `own` holds are buffers, which may be left out.
    """
    unknown = sorted(new.keys() - own.keys())
    if unknown:
        raise WeightSyncError(f"unknown tensors: {some_names(unknown)}")
    given = {own[name].data_ptr() for name in new}
    missing = sorted(name for name in needed if own[name].data_ptr() not in given)
    if missing:
        raise WeightSyncError(f"missing tensors: {some_names(missing)}")
    first: dict[int, str] = {}
    for name, tensor in new.items():
        if tensor.shape != own[name].shape:
            raise WeightSyncError(f"{name}: shape {tuple(tensor.shape)} given, {tuple(own[name].shape)} needed")
        if not tensor.is_floating_point() and own[name].is_floating_point():
            raise WeightSyncError(f"{name}: type {tensor.dtype} given, a float type needed")
        twin = first.setdefault(own[name].data_ptr(), name)
        if twin != name and not (new[twin] is tensor or torch.equal(new[twin], tensor)):
            raise WeightSyncError(f"{twin} and {name} are one tensor in this model but differ in the new weights")
