"""One pass through the model for some rows: which rows and columns, the arrays, the draw of the next tokens.

With `deterministic` an attempt's numbers depend on nothing but its own tokens: prefill runs one attempt at a time in
chunks that start at fixed positions, decoding always computes all rows and reads a padded length that the row's own
length decides, and only whole chunks that prefill computed are used again. Not covered: what becomes of the tokens
(engine.py).
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from relax_trio.backend.embedded.kv import KvStore, StepPlan
from relax_trio.backend.embedded.model import CausalModel
from relax_trio.backend.embedded.rows import RowTable, Running
from relax_trio.backend.embedded.sampling import sample

PREFILL_CHUNK = 512
"""Most tokens of one attempt in one pass: what an abort or a short attempt may have to wait for."""

PREFILL_TOKENS = 4096
"""Most padded prefill tokens between two decode steps."""

CHEAP_TOKENS = 512
"""Padded tokens up to which one pass is cheaper than two, whatever the padding."""

FIXED_CHUNK = 64
"""Prefill chunk under `deterministic`: chunks start at multiples of it."""

FIXED_LENGTH = 256
"""Least padded length under `deterministic`; doubled as often as a row needs."""

Ints = NDArray[np.int64]


@frozen(kw_only=True)
class EngineLimits:
    """Sizes of an engine, in attempts and tokens."""

    max_batch: int
    max_context_len: int
    max_cached_tokens: int
    deterministic: bool


@frozen(kw_only=True)
class PrefillPart:
    """Rows `first` to `end - 1` compute up to `width` tokens each."""

    first: int
    end: int
    width: int

    @property
    def n_padded(self) -> int:
        """Tokens computed, padding included."""
        return (self.end - self.first) * self.width


@frozen(kw_only=True)
class Drawn:
    """New tokens: one id and its logprob, both float64, for each of `rows` (int64)."""

    rows: Ints
    ids: NDArray[np.float64]
    log_probs: NDArray[np.float64]


class Passes:
    """Runs the model over rows of a table; computes keys and values and draws, but ends nothing."""

    def __init__(self, model: CausalModel, store: KvStore, rows: RowTable, limits: EngineLimits) -> None:
        self._model = model
        self._store = store
        self._rows = rows
        self._limits = limits

    def next_prefill(self) -> PrefillPart | None:
        """The next rows to prefill together, None when no row needs it."""
        pending = np.flatnonzero(self._in_prefill())
        if not len(pending):
            return None
        first = end = int(pending[0])
        if self._limits.deterministic:
            return PrefillPart(first=first, end=first + 1, width=FIXED_CHUNK)
        need = self._rows.length - self._rows.kv_len
        width = n_real = 0
        for row in pending.tolist():
            chunk = min(int(need[row]), PREFILL_CHUNK)
            wider = max(width, chunk)
            n_padded = wider * (row + 1 - first)
            too_much = n_padded > min(PREFILL_TOKENS, max(CHEAP_TOKENS, 2 * (n_real + chunk)))
            if row != end or (row != first and too_much):
                break
            width, n_real, end = wider, n_real + chunk, row + 1
        return PrefillPart(first=first, end=end, width=width)

    def prefill(self, part: PrefillPart) -> Drawn | None:
        """Compute the next chunk of each row of `part`; draw where that was the last one."""
        rows, width, span = self._rows, part.width, slice(part.first, part.end)
        start = rows.kv_len[span].copy()
        stop = np.minimum(rows.length[span], start + width)
        length = int(stop.max())
        if self._limits.deterministic:
            length = min(int(start[0]) + width, self._limits.max_context_len)
        self._store.grow(rows.n, length)
        # Right-aligned: the last column holds every row's last token, so one column of logits is enough.
        position = stop[:, None] - width + np.arange(width)
        real = position >= start[:, None]
        position[~real] = 0
        row = np.arange(part.first, part.end)[:, None]
        ids = np.where(real, rows.tokens[row, position], 0)
        index = np.where(real, row * self._store.capacity + position, self._store.trash)
        logits = self._forward(part.first, length, ids, position, index)
        rows.kv_len[span] = stop
        done = np.flatnonzero(stop == rows.length[span])
        if not len(done):
            return None
        at = part.first + done
        ids_drawn, log_probs = self._draw(logits[torch.from_numpy(done).to(logits.device)], at)
        return Drawn(rows=at, ids=ids_drawn, log_probs=log_probs)

    def decode_parts(self) -> list[tuple[list[Running], int]]:
        """Attempts that decode together now, with the length that their pass reads."""
        ready = np.flatnonzero(~self._in_prefill())
        if not len(ready):
            return []
        length = self._rows.length[ready]
        if self._limits.deterministic:
            doublings = np.ceil(np.log2(np.maximum(length, FIXED_LENGTH) / FIXED_LENGTH)).astype(np.int64)
            padded = np.minimum(FIXED_LENGTH * 2**doublings, self._limits.max_context_len)
        else:
            padded = np.full_like(length, length.max())
        running = self._rows.running
        return [([running[row] for row in ready[padded == n]], int(n)) for n in np.unique(padded)]

    def decode(self, ready: Ints, length: int) -> Drawn:
        """One token for each row of `ready`; idle rows between them (deterministic: all others) are computed too."""
        rows = self._rows
        first, end = int(ready.min()), int(ready.max()) + 1
        if self._limits.deterministic:
            first, end = 0, self._limits.max_batch
        self._store.grow(rows.n, length)
        row = np.arange(first, end)
        idle = np.ones(end - first, np.bool_)
        idle[ready - first] = False
        position = np.where(idle, 0, rows.length[first:end] - 1)
        ids = np.where(idle, 0, rows.tokens[row, position])
        index = np.where(idle, self._store.trash, row * self._store.capacity + position)
        logits = self._forward(first, length, ids[:, None], position[:, None], index)
        ids_drawn, log_probs = self._draw(logits, slice(first, end))
        used = ready - first
        return Drawn(rows=ready, ids=ids_drawn[used], log_probs=log_probs[used])

    def _in_prefill(self) -> NDArray[np.bool_]:
        """Rows with more than the newest token to compute."""
        rows, n = self._rows, self._rows.n
        in_prefill = rows.length[:n] - rows.kv_len[:n] > 1
        if self._limits.deterministic:
            # A first token always comes from a prefill pass, whether or not all before it was cached.
            in_prefill |= rows.length[:n] == rows.prompt_len[:n]
        return np.asarray(in_prefill)

    def _forward(self, first: int, length: int, ids: Ints, position: Ints, index: Ints) -> torch.Tensor:
        """Logits (B, V) after the last column of `ids` (B, T); `index` (B, T) says where its keys and values go."""
        device = self._model.device
        places = torch.from_numpy(index.reshape(-1)).to(device)
        self._store.plan = StepPlan(first=first, n_rows=len(ids), length=length, index=places)
        ids_there, position_there = (
            torch.from_numpy(values.astype(np.int64, copy=False)).to(device) for values in (ids, position)
        )
        return self._model.logits(ids_there, position_there, self._store)

    def _draw(self, logits: torch.Tensor, rows: slice | Ints) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ids and logprobs drawn from the logits of `rows`, brought over in one copy."""
        ids, log_probs = sample(logits, self._rows.draw(rows))
        both = torch.stack((ids.to(torch.float64), log_probs.to(torch.float64))).cpu().numpy()
        return both[0], both[1]
