"""Attention over rows that stand one after the other: each row sees itself only, and no token is padding.

Registers one attention function with transformers. It runs a causal kernel for each row, so that its cost is the sum
of squares of the rows' lengths, and it never makes a mask of the whole batch. FlashAttention does the same in one
kernel where it is installed. Not covered: models whose layers carry state along the sequence (Mamba and its like);
they are found out by trying, and are trained on padded rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.import_utils import is_flash_attn_2_available

from relax_trio.errors import ConfigError

Attention: TypeAlias = Literal["auto", "sdpa", "flash_attention_2"]

PACKED = "relax_trio_packed"
FLASH = "flash_attention_2"

_PROBE_LENS = (3, 5, 2)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_windows: ContextVar[list[int | None] | None] = ContextVar("_windows", default=None)
"""Where the sliding windows that layers ask for are noted while a model is tried out."""


def row_kwargs(row_lens: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a forward pass that tell attention where rows begin; the names are FlashAttention's.

    Args:
      row_lens: tokens of each row; their sum is the length of the batch.
      device: where FlashAttention needs the places. `packed_attention` reads `row_lens` itself.
    """
    places = torch.zeros(len(row_lens) + 1, dtype=torch.int32)
    places[1:] = torch.tensor(row_lens, dtype=torch.int32).cumsum(0)
    places = places.to(device, non_blocking=True)
    longest = max(row_lens)
    return {
        "cu_seq_lens_q": places,
        "cu_seq_lens_k": places,
        "max_length_q": longest,
        "max_length_k": longest,
        "row_lens": tuple(row_lens),
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_lens: tuple[int, ...] | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row, as transformers calls it. No dropout: the model is in evaluation mode.

    Args:
      query: (B, heads, T, D).
      key, value: (B, key-value heads, T, D).
      attention_mask: None: transformers makes none for a function of this name.
      sliding_window: a token sees the last so many tokens, itself included.
      row_lens: lengths of the rows of a packed batch (B = 1); None: every one of the B rows has T tokens.
      softcap, s_aux: of models whose own attention has them; it then does the work.

    Returns:
      (B, T, heads, D) and no attention weights.

    Raises:
      ValueError: there is a mask.
    """
    if attention_mask is not None:
        raise ValueError("this model makes a mask of its own, which knows nothing of rows")
    if (noted := _windows.get()) is not None:
        noted.append(sliding_window)
    plain = softcap is None and s_aux is None
    extra = {name: given for name, given in (("softcap", softcap), ("s_aux", s_aux)) if given is not None}
    attend: Callable[..., tuple[torch.Tensor, Any]] = sdpa_attention_forward if plain else _own_attention(module)
    parts = []
    lens = [query.shape[2]] if row_lens is None else list(row_lens)
    for q, k, v in zip(*(torch.split(t, lens, dim=2) for t in (query, key, value)), strict=True):
        mask = _mask(q, sliding_window, always=not plain)
        causal = {"is_causal": True} if plain and mask is None else {}
        parts.append(attend(module, q, k, v, mask, scaling=scaling, **causal, **extra)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


AttentionInterface.register(PACKED, packed_attention)


def set_attention(model: torch.nn.Module, wanted: Attention) -> bool:
    """Choose the model's attention, and find out whether its rows can be packed.

    Args:
      model: a causal LM in evaluation mode.
      wanted: `auto` is FlashAttention where it is installed and the weights are on a GPU, else SDPA.

    Returns:
      Whether packed rows come out as they do alone. If not, the model keeps the attention it had.

    Raises:
      ConfigError: FlashAttention is asked for and isn't there.
    """
    device = next(model.parameters()).device
    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if wanted == FLASH and not has_flash:
        raise ConfigError("--attn-implementation flash_attention_2: needs a GPU and the package flash-attn; use auto")
    hugging_face: Any = model  # torch types what a module has beyond its own as a tensor or a module
    config, choose = hugging_face.config, hugging_face.set_attn_implementation
    before = config._attn_implementation
    text = config.get_text_config()
    types = list(getattr(text, "layer_types", None) or ())
    if set(types) - _LAYER_TYPES:
        return False
    if getattr(config, "vision_config", None) is not None:
        # What is chosen here is chosen for the vision tower too, which attends in both directions.
        if wanted == FLASH:
            choose(FLASH)
        return False
    try:
        choose("eager")
        alone = [_last_hidden(model, ids[None]) for ids in _probe_rows(text.vocab_size, device)]
        choose(PACKED)
        if not _packs(model, alone, _n_sliding(text, types)):
            choose(before)
            return False
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        # A model of its own making may take none of these arguments: then it is one that can't be packed.
        choose(before)
        return False
    if has_flash and wanted in ("auto", FLASH):
        choose(FLASH)
    return True


def is_flash(model: torch.nn.Module) -> bool:
    """Whether attention is FlashAttention's, which takes half precision only."""
    config: Any = model.config
    return bool(config._attn_implementation == FLASH)


def _packs(model: torch.nn.Module, alone: Sequence[torch.Tensor], n_sliding: int) -> bool:
    config: Any = model.config
    rows = _probe_rows(config.get_text_config().vocab_size, alone[0].device)
    token = _windows.set([])
    try:
        together = _last_hidden(
            model,
            torch.cat(rows)[None],
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None].to(alone[0].device),
            **row_kwargs(_PROBE_LENS, alone[0].device),
        )
        seen = _windows.get() or []
    finally:
        _windows.reset(token)
    # A probe is shorter than any window: that the layers tell theirs is asked for apart.
    windowed = sum(1 for window in seen if window is not None)
    return windowed == n_sliding and torch.allclose(together, torch.cat(list(alone), dim=1), rtol=1e-3, atol=1e-4)


def _n_sliding(text: Any, types: Sequence[str]) -> int:
    """Layers whose attention slides, by the model's configuration."""
    if types:
        return types.count("sliding_attention")
    return int(text.num_hidden_layers) if isinstance(getattr(text, "sliding_window", None), int) else 0


def _probe_rows(n_vocab: int, device: torch.device) -> list[torch.Tensor]:
    ids = torch.arange(1, sum(_PROBE_LENS) + 1, device=device) * 7 % n_vocab
    return list(torch.split(ids, list(_PROBE_LENS)))


@torch.no_grad()
def _last_hidden(model: torch.nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True, **kwargs)
    return torch.as_tensor(out.hidden_states[-1], dtype=torch.float64)


def _own_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The plain attention of the model's own file, which knows its peculiarities."""
    own: Callable[..., tuple[torch.Tensor, Any]] = sys.modules[type(module).__module__].eager_attention_forward
    return own


def _mask(query: torch.Tensor, window: int | None, *, always: bool) -> torch.Tensor | None:
    """Additive mask (1, 1, n, n) of one row; None where a causal kernel needs none."""
    n = query.shape[2]
    slides = window is not None and n > window
    if not (slides or always):
        return None
    places = torch.arange(n, device=query.device)
    hidden = places > places[:, None]
    if slides:
        assert window is not None
        hidden |= places <= places[:, None] - window
    zeros = torch.zeros((1, 1, n, n), dtype=query.dtype, device=query.device)
    return zeros.masked_fill_(hidden, torch.finfo(query.dtype).min)
