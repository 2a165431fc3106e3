"""Rotary embeddings whose frequencies change with the length of what is read: up to which length they don't.

transformers takes the longest position of a whole batch for it, with both types that do so ("dynamic" and "longrope").
A row's logprobs then depend on which rows it shares a batch with, padded or packed, and the keys of a prefix cache on
the length at which they were computed. Below the length given here such a model is like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def constant_rope_len(config: Any) -> int | None:
    """Tokens up to which the frequencies of a model are those of one token; None: they never change.

    Args:
      config: of transformers; a mapping of parameters by layer type counts as its strictest one.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return None
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    limits = [limit for kind in kinds if (limit := _limit(kind, text.max_position_embeddings)) is not None]
    return min(limits, default=None)


def _limit(parameters: Mapping[str, Any], max_position: int) -> int | None:
    rope_type = str(parameters.get("rope_type", ""))
    if "dynamic" in rope_type:
        return max_position
    if rope_type == "longrope":
        return int(parameters.get("original_max_position_embeddings", max_position))
    return None
