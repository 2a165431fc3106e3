"""A proof at start that slot rows decode this model right: an odd architecture is refused, not garbled."""

from __future__ import annotations

import torch

from relax_trio.backend.embedded.kv import KvStore, StepPlan
from relax_trio.backend.embedded.model import CausalModel
from relax_trio.errors import ConfigError

_SHORT, _LONG = 6, 9


def check_decoding(model: CausalModel) -> None:
    """Prefill two rows of different length together, decode one token more, and compare with the plain model.

    Raises:
      ConfigError: the logits differ: the model does something with its cache, mask or positions that rows don't give.
    """
    vocab_len = model.info.vocab_len
    store = KvStore(model.spec, max_rows=2, max_len=_LONG + 1)
    store.grow(2, _LONG + 1)
    tokens = torch.arange(2 * (_LONG + 1)).reshape(2, -1) * 7 % vocab_len
    with torch.inference_mode():
        prefilled = _pass(model, store, tokens, start=[0, 0], stop=[_SHORT, _LONG])
        decoded = _pass(model, store, tokens, start=[_SHORT, _LONG], stop=[_SHORT + 1, _LONG + 1])
        plain = [model.plain_logits(row.to(model.device)).cpu() for row in tokens]
    lengths = (_SHORT, _LONG)
    pairs = [(prefilled[i], plain[i][n - 1]) for i, n in enumerate(lengths)]
    pairs += [(decoded[i], plain[i][n]) for i, n in enumerate(lengths)]
    worst = max(float((ours - theirs).abs().max() / (1.0 + theirs.abs().max())) for ours, theirs in pairs)
    # Rounding only: bfloat16 keeps 8 bits and rounds in each layer.
    bound = 1e-3 if model.spec.dtype == torch.float32 else 0.1
    if not worst <= bound:
        raise ConfigError(
            f"{model.info.path}: {type(model).__name__} decodes this architecture wrongly (relative difference "
            f"{worst:.2g} to a plain forward pass); the embedded engine can't serve it"
        )


def _pass(model: CausalModel, store: KvStore, tokens: torch.Tensor, start: list[int], stop: list[int]) -> torch.Tensor:
    """Logits (2, V) on the CPU after computing positions `start` to `stop` of each row."""
    width = max(b - a for a, b in zip(start, stop, strict=True))
    ids = torch.zeros((2, width), dtype=torch.int64)
    positions = torch.zeros((2, width), dtype=torch.int64)
    index = torch.full((2, width), store.trash, dtype=torch.int64)
    for row, (a, b) in enumerate(zip(start, stop, strict=True)):
        ids[row, width - (b - a) :] = tokens[row, a:b]
        positions[row, width - (b - a) :] = torch.arange(a, b)
        index[row, width - (b - a) :] = torch.arange(a, b) + row * store.capacity
    store.plan = StepPlan(first=0, n_rows=2, length=max(stop), index=index.reshape(-1).to(model.device))
    return model.logits(ids.to(model.device), positions.to(model.device), store).cpu()
